"""The reasons that llama.cpp logs when a call fails: the call itself returns none."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import tempfile
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
