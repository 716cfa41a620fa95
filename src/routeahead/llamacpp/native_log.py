"""The reasons that llama.cpp logs when a call fails: the call itself returns none."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import llama_cpp
from llama_cpp._logger import llama_log_callback, logger

_ERROR = 4  # ggml.h; the numbers in llama_cpp._logger are of an older version
# "llama_kv_cache:        CPU KV buffer size =     1.50 MiB"
_BUFFER = re.compile(rb"(\S+) +(\w+) buffer size = +([\d.]+) MiB")
_internals: Any = llama_cpp._internals
_one = threading.Lock()  # what follows is the process's: its log and its stdout
_collectors: list[Callable[[int, bytes, int], None]] = []  # of the thread that has the lock


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _collect(level: int, text: bytes, user_data: int) -> None:
    """One for ever: a thread that frees a context may have begun to call it when another thread's
    load ends, and C must not call what Python has freed."""
    for collect in _collectors or (llama_log_callback,):
        collect(level, text, user_data)


class Buffers(NamedTuple):
    """What llama.cpp allocated beside the weights: what for, such as "KV" → bytes."""

    host: dict[str, int]
    device: dict[str, int]

    def add(self, where: str, what: str, nbytes: int) -> None:
        """`where` is the buffer type's name; a device's driver may have pinned host memory."""
        here = where.startswith("CPU") or where.endswith("_Host")
        sizes = self.host if here else self.device
        if what != "model":
            sizes[what] = sizes.get(what, 0) + nbytes


@contextlib.contextmanager
def errors(buffers: Buffers | None = None) -> Iterator[list[str]]:
    """Collects the error lines that are logged meanwhile, instead of printing them, and the buffers
    that llama.cpp allocates.

    One thread of the process at a time. Meanwhile llama-cpp-python does not point stdout and stderr
    at /dev/null: two loads at once, or one that never returns, would leave them there.
    """
    lines: list[str] = []

    def collect(level: int, text: bytes, user_data: int) -> None:
        if level == _ERROR:
            lines.append(text.decode(errors="replace").strip())
        if buffers is not None and (found := _BUFFER.search(text)):
            where, what, size = (part.decode(errors="replace") for part in found.groups())
            buffers.add(where, what, int(float(size) * (1 << 20)))
        if level != _ERROR and logger.level == logging.DEBUG:  # llama.cpp is to be verbose
            llama_log_callback(level, text, user_data)

    with _one:
        redirect = _internals.suppress_stdout_stderr
        _internals.suppress_stdout_stderr = _as_it_is
        _collectors.append(collect)
        llama_cpp.llama_log_set(_collect, ctypes.c_void_p(0))
        try:
            yield lines
        finally:
            llama_cpp.llama_log_set(llama_log_callback, ctypes.c_void_p(0))
            _collectors.clear()
            _internals.suppress_stdout_stderr = redirect


def _as_it_is(disable: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """Collects the lines that native code prints to stderr in the `with` block, as its parser of
    grammars does; they are there when the block has ended."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            lines += caught.read().decode(errors="replace").splitlines()
