"""Reads bytes of the model's files into memory. Knows files and offsets, not experts.

Tests and experiments put another `Reader`, which delays, reorders or fails, between the lanes and
the disk.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from routeahead.errors import ReadError
from routeahead.experts.layout import BLOCK, Shard

O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # absent on macOS: reads are buffered there


class Reader(Protocol):
    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        """Fills `view` from byte `offset` of file `shard`; returns the bytes read.

        `offset`, the address of `view` and its length are multiples of BLOCK. At the end of the
        file fewer bytes than `len(view)` may come, but never fewer than `need`.

        Raises:
            ReadError: the device failed or the file ended before `need` bytes.
        """
        ...

    def close(self) -> None: ...


class FileReader:
    """Reads with `preadv`, through O_DIRECT if the file system then gives the same bytes.

    Attributes:
        direct: whether O_DIRECT is in use.
        fallback: why it is not, if it was asked for; empty otherwise.
    """

    def __init__(self, shards: Sequence[Shard], *, direct: bool = True) -> None:
        self._shards = shards
        self._descriptors = [os.open(s.path, os.O_RDONLY) for s in shards]
        self.fallback = ""
        self.direct = False
        if direct:
            self._try_direct()

    def _try_direct(self) -> None:
        """Uses O_DIRECT descriptors if every shard passes the check; else sets `fallback`."""
        opened: list[int] = []
        try:
            for shard, buffered in zip(self._shards, self._descriptors, strict=True):
                opened.append(os.open(shard.path, os.O_RDONLY | O_DIRECT) if O_DIRECT else -1)
                self.fallback = self.fallback or _direct_fault(shard, opened[-1], buffered)
        except OSError as error:
            self.fallback = f"O_DIRECT refused: {error.strerror}"
        if self.fallback:
            _close_all(opened)
            return
        _close_all(self._descriptors)
        self._descriptors, self.direct = opened, True

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        descriptor, got = self._descriptors[shard], 0
        try:
            while got < need:
                count = os.preadv(descriptor, [view[got:] if got else view], offset + got)
                if count == 0:
                    raise self._error(
                        shard, offset, need, f"the file ends {need - got} bytes early"
                    )
                # An O_DIRECT read may stop short inside a block; it can only go on at its start.
                got = got + count if got + count >= need else (got + count) // BLOCK * BLOCK
        except OSError as error:
            raise self._error(shard, offset, need, error.strerror or str(error)) from error
        return got

    def _error(self, shard: int, offset: int, need: int, why: str) -> ReadError:
        path = self._shards[shard].path
        return ReadError(f"{path}: reading {need} bytes at offset {offset} failed: {why}")

    def close(self) -> None:
        _close_all(self._descriptors)
        self._descriptors = []


class Throttled:
    """A slower disk: all lanes together get `bytes_per_s`, and each read starts `latency_s` late.

    It imitates a phone's flash memory or a laptop's disk: after the real read, it sleeps for what
    is left of the time that the slower disk would have taken.
    """

    def __init__(self, inner: Reader, *, bytes_per_s: float, latency_s: float) -> None:
        self._inner, self._bytes_per_s, self._latency_s = inner, bytes_per_s, latency_s
        self._lock = threading.Lock()
        self._idle_from = 0.0  # when the slower disk has sent all that was asked for so far

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        asked = time.perf_counter()
        with self._lock:
            begin = max(asked + self._latency_s, self._idle_from)
            self._idle_from = end = begin + len(view) / self._bytes_per_s
        got = self._inner.read(shard, offset, view, need)
        time.sleep(max(0.0, end - time.perf_counter()))
        return got

    def close(self) -> None:
        self._inner.close()


def _direct_fault(shard: Shard, direct: int, buffered: int) -> str:
    """Reads one block in the middle of a file both ways; why O_DIRECT cannot be used, or ''."""
    if direct < 0:
        return "this system has no O_DIRECT"
    offset = shard.size // 2 // BLOCK * BLOCK
    with mmap.mmap(-1, BLOCK) as page, memoryview(page) as view:
        count = os.preadv(direct, [view], offset)
        same = bytes(view[:count]) == os.pread(buffered, BLOCK, offset)
    return "" if same else f"{shard.path} reads differently through O_DIRECT"


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
