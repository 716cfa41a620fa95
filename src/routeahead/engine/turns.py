"""Who may use a model: one call at a time, in the process that loaded it, until it is closed."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, NoReturn, ParamSpec, TypeVar

from routeahead.errors import UseError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Turns:
    """Lets one call at a time use a context; the others wait.

    A call holds the lock while it runs: an `eval`, a whole completion, one step of a stream. Calls
    inside a call of the same thread pass. Between two steps of a stream nobody holds the lock, so a
    stream that nobody reads any more blocks nobody. If another thread has used the context in
    between, the stream ends with an error, because its tokens are no longer in the context.

    All that is here is changed by the lock's holder alone.

    Attributes:
        forked: whether this is a child process of the one that loaded the model.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # calls that run now, each inside the one before
        self._last_stream: object = None  # what used the context last, if it was a stream
        self._last_thread = 0
        self.forked = False
        _all.add(self)

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Result of `function(...)`, in its turn.

        Raises:
            UseError: this is a child process, and the model was loaded in its parent.
        """
        if self.forked:
            raise UseError(
                "this model was loaded before a fork, and its threads are in the parent process: "
                "load it in the child"
            )
        with self._lock:
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self._last_stream, self._last_thread = None, threading.get_ident()

    @property
    def nested(self) -> bool:
        """For the lock's holder: whether its call is inside another one."""
        return self._depth > 1

    def stream(self, steps: Generator[R, S, Any]) -> Generator[R, S, None]:
        """A generator each step of which is a call, and whose tokens stay in the context.

        Raises:
            UseError: another thread has used the context between two steps.
        """
        name, thread, sent = object(), 0, None

        def step() -> R:
            nonlocal thread
            if thread and self._last_stream is not name and self._last_thread != thread:
                raise UseError(
                    "another thread used this model between two tokens of this stream: "
                    "finish a stream before the next call"
                )
            thread = threading.get_ident()
            return steps.send(sent)  # type: ignore[arg-type]

        try:
            while True:
                with self._lock:
                    item = self.call(step)
                    self._last_stream = name
                sent = yield item
        except StopIteration:
            return
        finally:
            steps.close()


class Closed:
    """Stands in for what a closed model no longer has."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UseError("this model is closed: load it again")


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _after_fork() -> None:
    for turns in list(_all):
        turns.forked = True
        turns._lock, turns._depth = threading.RLock(), 0  # a thread of the parent may hold it


os.register_at_fork(after_in_child=_after_fork)
