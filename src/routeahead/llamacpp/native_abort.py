"""Turns ggml's assertions into exceptions, where a file that nobody can trust is loaded.

A failed assertion calls back and then ends the process. The call that may fail therefore runs in a
thread of its own, which the callback never leaves: what the library had in its hands at that point
is lost, but the process lives and can say what happened. `gguf_check` refuses what is known; this
is for what is not.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from routeahead.errors import no_thread
from routeahead.llamacpp import ggml

T = TypeVar("T")

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class NativeAbort(RuntimeError):
    """An assertion of ggml or llama.cpp failed; the message is its text."""


def guarded(call: Callable[[], T]) -> T:
    """Result of `call`, which runs in another thread. One such call at a time: ggml has one
    callback (`native_log.errors`, in which a load runs, sees to that).

    A signal that arrives meanwhile is handled when the call has ended, as if it ran in this thread.

    Raises:
        NativeAbort: an assertion failed in it. The thread and its memory stay behind.
        SettingsError: the system refused to start the thread.
        BaseException: whatever `call` raised.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()
    idents: list[int] = []

    def run() -> None:
        idents.append(_thread.get_ident())
        try:
            outcome.append(call())
        except BaseException as error:
            errors.append(error)
        ended.set()

    def aborted(message: bytes) -> None:
        if _thread.get_ident() in idents:
            errors.append(NativeAbort(_reason(message)))
            ended.set()
            threading.Event().wait()  # for ever: to return would end the process
        print(message.decode(errors="replace"), file=sys.stderr, flush=True)  # another model's

    callback = _Callback(aborted)
    set_callback = ggml.library().ggml_set_abort_callback
    before = set_callback(ctypes.cast(callback, ctypes.c_void_p))
    try:
        try:
            _thread.start_new_thread(run, ())  # `Thread.start` waits, and a signal would end that
        except RuntimeError:
            raise no_thread("loading the model") from None
        _wait(ended)
    finally:
        set_callback(before)
    if errors:
        raise errors[0]
    return outcome[0]


def _wait(ended: threading.Event) -> None:
    """Waits through signals; the first exception that a handler raised is raised at the end."""
    interrupt: BaseException | None = None
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:
            interrupt = interrupt or error
    if interrupt:
        raise interrupt


def _reason(message: bytes) -> str:
    """The text of "/build/src/llama-model.cpp:12: GGML_ASSERT(x) failed", its place last."""
    place, _, what = message.decode(errors="replace").partition(": ")
    return f"{what} ({os.path.basename(place)})"
