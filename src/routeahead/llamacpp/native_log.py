"""What llama.cpp says when it fails: it logs the reason and returns nothing."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator
from typing import Any

import llama_cpp
from llama_cpp._logger import llama_log_callback, logger

_ERROR = 4  # ggml.h; the numbers in llama_cpp._logger are of an older version
_internals: Any = llama_cpp._internals
_one = threading.Lock()  # what follows is the process's: its log and its stdout


@contextlib.contextmanager
def errors() -> Iterator[list[str]]:
    """Collects the error lines that are logged meanwhile, instead of printing them.

    One thread of the process at a time. Meanwhile llama-cpp-python does not point stdout and stderr
    at /dev/null: two loads at once, or one that never returns, would leave them there.
    """
    lines: list[str] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def collect(level: int, text: bytes, user_data: int) -> None:
        if level == _ERROR:
            lines.append(text.decode(errors="replace").strip())
        elif logger.level == logging.DEBUG:  # the caller wants llama.cpp to be verbose
            llama_log_callback(level, text, user_data)

    with _one:
        redirect = _internals.suppress_stdout_stderr
        _internals.suppress_stdout_stderr = _as_it_is
        llama_cpp.llama_log_set(collect, ctypes.c_void_p(0))
        try:
            yield lines
        finally:
            llama_cpp.llama_log_set(llama_log_callback, ctypes.c_void_p(0))
            _internals.suppress_stdout_stderr = redirect


def _as_it_is(disable: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
