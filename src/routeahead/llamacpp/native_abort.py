"""What becomes of ggml's assertions, which end the process.

A failed assertion calls back first. Where a file that nobody can trust is loaded, that becomes an
exception: the call runs in a thread of its own, which the callback never leaves. What the library
had in its hands at that point is lost, but the process lives and can say what happened.
`gguf_check` refuses what is known; this is for what is not.

Anywhere else, in a token's arithmetic most likely, nobody could go on: half of the graph's threads
wait for the one that failed. The process ends as llama.cpp has it, and one line says of which file
that may come.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from routeahead.errors import no_thread, visible
from routeahead.llamacpp import ggml

T = TypeVar("T")

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_files: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()  # model → its file


class NativeAbort(RuntimeError):
    """An assertion of ggml or llama.cpp failed; the message is its text."""


class _Guard:
    """One guarded call: its thread, what it gave, and whether it has ended."""

    def __init__(self) -> None:
        self.ident = 0
        self.errors: list[BaseException] = []
        self.ended = threading.Event()


_guards: list[_Guard] = []  # one at most
_unsaid = [None]  # taken out by the thread that says why the process ends


@_Callback  # type: ignore[untyped-decorator]
def _aborted(message: bytes) -> None:
    """One for ever, on whichever thread an assertion fails; to return ends the process."""
    reason = _reason(message)
    for guard in _guards:
        if guard.ident == _thread.get_ident():
            guard.errors.append(NativeAbort(reason))
            guard.ended.set()
            threading.Event().wait()  # for ever
    files = visible(" or ".join(dict.fromkeys(_files.values())))
    line = (
        f"routeahead: llama.cpp cannot compute with {files or 'a model'} and ends the process: "
        f"{visible(reason)}; compare the file with its source, or download it again\n"
    )
    try:
        _unsaid.pop()  # atomic: all threads of a graph may fail at once
    except IndexError:
        threading.Event().wait()  # for ever: the thread that says it ends the process
    os.write(2, line.encode())  # a thread that waits for ever may have `sys.stderr`'s lock


def remember(model: object, file: str) -> None:
    """An assertion that fails while `model` lives may come of that file."""
    _files[model] = file


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
    guard = _Guard()

    def run() -> None:
        guard.ident = _thread.get_ident()
        try:
            outcome.append(call())
        except BaseException as error:
            guard.errors.append(error)
        guard.ended.set()

    _guards.append(guard)
    ggml.library().ggml_set_abort_callback(ctypes.cast(_aborted, ctypes.c_void_p))
    try:
        try:
            _thread.start_new_thread(run, ())  # `Thread.start` waits, and a signal would end that
        except RuntimeError:
            raise no_thread("loading the model") from None
        _wait(guard.ended)
    finally:
        _guards.remove(guard)  # another thread may get that number
    if guard.errors:
        raise guard.errors[0]
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
