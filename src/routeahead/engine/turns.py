"""Who may use a model: one call at a time, in the process that loaded it, until it is closed."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import llama_cpp

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


class TakingTurns(llama_cpp.Llama):
    """A `llama_cpp.Llama` whose calls take turns, and which is of no use after `close`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made._turns = Turns()
        return made

    _turns: Turns

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """As `llama_cpp.Llama.generate`.

        Raises:
            UseError: another thread used the model between two tokens.
        """
        return self._turns.stream(self._generate(tokens, *args, **kwargs))

    def _generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        return super().generate(tokens, *args, **kwargs)

    def eval(self, tokens: Sequence[int]) -> None:
        """As `llama_cpp.Llama.eval`. One token after others is a decode, anything else prefill,
        unless `phase` or `decoding` says otherwise.

        Raises:
            ReadError: an expert's bytes did not arrive. The failed batch left no trace.
        """
        self._turns.call(self._eval, tokens)

    def _eval(self, tokens: Sequence[int]) -> None:
        super().eval(tokens)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As `llama_cpp.Llama.sample`."""
        return self._turns.call(self._sample, *args, **kwargs)

    def _sample(self, *args: Any, **kwargs: Any) -> int:
        return int(super().sample(*args, **kwargs))

    def reset(self) -> None:
        """As `llama_cpp.Llama.reset`."""
        self._turns.call(super().reset)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As `llama_cpp.Llama.embed`."""
        return self._turns.call(super().embed, *args, **kwargs)

    def save_state(self) -> llama_cpp.LlamaState:
        """The context's tokens and KV cache, for `load_state`.

        Another instance of the same model with the same `n_ctx` and `n_batch` can load it, whatever
        its streaming settings: what the expert cache holds is no part of it.
        """
        return self._turns.call(super().save_state)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Continues where the state was saved, by this instance or another one."""
        self._turns.call(super().load_state, state)

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As `llama_cpp.Llama.create_completion`; without `stream`, other calls wait for it."""
        return self._turns.call(super().create_completion, *args, **kwargs)

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """As llama-cpp-python's, but what it makes of a logits processor, which is part of a cycle,
        does not keep this object alive."""
        # Not `llama_cpp.Llama._init_sampler`: who replaces that class finds this one there.
        plain: Any = super()._init_sampler
        return plain.__func__(weakref.proxy(self), *args, **kwargs)

    def close(self) -> None:
        """Gives back memory, threads and descriptors; waits for the call that runs now.

        In a child process after a fork it does nothing.

        Raises:
            UseError: it is called inside another call of this model.
        """
        if not self._turns.forked:
            self._turns.call(self._close)

    def _close(self) -> None:
        if self._turns.nested:
            raise UseError("a model cannot be closed inside a call of it")
        self._sampler = None
        try:
            self._release()
        finally:
            closed: Any = Closed()
            self._ctx = self._model = self._batch = self.tokenizer_ = closed
            if "scores" in vars(self):
                self.scores = self.scores[:0].copy()

    def _release(self) -> None:
        """Frees the context and the model."""
        if hasattr(self, "_stack"):
            super().close()


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _after_fork() -> None:
    for turns in list(_all):
        turns.forked = True
        turns._lock, turns._depth = threading.RLock(), 0  # a thread of the parent may hold it


os.register_at_fork(after_in_child=_after_fork)
