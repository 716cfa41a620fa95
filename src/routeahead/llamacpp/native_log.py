"""The reasons that llama.cpp logs when a call fails: the call itself returns none."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator

import llama_cpp
from llama_cpp._logger import llama_log_callback, logger

_ERROR = 4  # ggml.h; the numbers in llama_cpp._logger are of an older version


@contextlib.contextmanager
def errors() -> Iterator[list[str]]:
    """Collects the error lines that are logged in the `with` block, instead of printing them."""
    lines: list[str] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def collect(level: int, text: bytes, user_data: int) -> None:
        if level == _ERROR:
            lines.append(text.decode(errors="replace").strip())
        elif logger.level == logging.DEBUG:  # the caller wants llama.cpp to be verbose
            llama_log_callback(level, text, user_data)

    llama_cpp.llama_log_set(collect, ctypes.c_void_p(0))
    try:
        yield lines
    finally:
        llama_cpp.llama_log_set(llama_log_callback, ctypes.c_void_p(0))
