"""Where dense weights live: an address range shaped like each file.

The arena reserves, for every shard, as many addresses as the file has bytes and puts file offset x
at base + x, so that a read of whole blocks lands in place although GGUF aligns tensors to 32 bytes
only. Memory is what is read into it. The addresses of experts stay empty: their bytes live in slots
(`experts/slots.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from routeahead.errors import StreamError
from routeahead.experts.layout import Shard, ceil_block, floor_block

HUGE = 2 << 20
PAGE = mmap.PAGESIZE  # 4 KiB on x86; 16 or 64 KiB on some aarch64 systems

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Pages(NamedTuple):
    """A page-aligned range: address and length in bytes."""

    address: int
    nbytes: int

    @classmethod
    def of(cls, view: memoryview) -> Pages:
        return cls(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))


def release(pages: Pages) -> None:
    """Returns memory to the kernel, in whole pages; the addresses stay."""
    first = -(-pages.address // PAGE) * PAGE
    end = (pages.address + pages.nbytes) // PAGE * PAGE
    if end > first:
        _libc.madvise(first, end - first, _MADV_DONTNEED)


def protect(pages: Pages, *, accessible: bool) -> None:
    if pages.nbytes:
        _libc.mprotect(pages.address, pages.nbytes, _READ_WRITE if accessible else 0)


class Reservation:
    """An anonymous mapping of which nothing is committed until it is written."""

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        self._nbytes = ceil_block(nbytes) + HUGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if _is_linux() else 0)
        try:
            self._mmap = mmap.mmap(-1, self._nbytes, flags=flags, prot=_READ_WRITE)
        except OSError as error:
            raise StreamError(
                f"cannot reserve {self._nbytes >> 20} MiB of addresses: {error.strerror}; "
                "raise `ulimit -v` or set vm.overcommit_memory to 0 or 1"
            ) from None
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        self._skip = -start % HUGE
        self.address = start + self._skip
        self.view = memoryview(self._mmap)[self._skip :]
        if huge and _is_linux():
            _libc.madvise(self.address, self._nbytes - HUGE, _MADV_HUGEPAGE)

        self._closed = False

    @property
    def range(self) -> Pages:
        return Pages(self.address, self._nbytes - HUGE)

    def close(self) -> None:
        """Gives the memory back at once, and the addresses as soon as nobody has a view of them.

        Nothing may use the memory any more. A second call does nothing: by then the addresses may
        be another mapping's.
        """
        if self._closed:
            return
        self._closed = True
        release(self.range)
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mmap.close()


def _is_linux() -> bool:
    return sys.platform == "linux"


class Arena:
    """Address ranges for all shards."""

    def __init__(self, shards: Sequence[Shard], *, poison: bool = False) -> None:
        """With `poison`, what was not exposed cannot be accessed (for tests)."""
        self._shards = [Reservation(s.size) for s in shards]
        self._poison = poison
        if poison:
            for shard in self._shards:
                protect(shard.range, accessible=False)

    def close(self) -> None:
        """Gives all memory back. Nothing may compute any more."""
        for reservation in self._shards:
            reservation.close()

    def address(self, shard: int, offset: int) -> int:
        """Where byte `offset` of file `shard` belongs."""
        return self._shards[shard].address + offset

    def expose(self, shard: int, start: int, end: int) -> tuple[int, memoryview]:
        """The whole blocks around file range [start, end), accessible for good: their offset and
        memory."""
        first, last = floor_block(start), ceil_block(end)
        if self._poison:
            protect(Pages(self.address(shard, first), last - first), accessible=True)
        return first, self._shards[shard].view[first:last]

    def map_file(self, shard: int, start: int, end: int, descriptor: int) -> None:
        """Maps the pages of a range of dense weights from the file, privately and lazily.

        Raises:
            StreamError: the kernel refused.
        """
        # A page that two ranges share is mapped twice, with the same bytes.
        first, last = start // PAGE * PAGE, -(-end // PAGE) * PAGE
        address = self.address(shard, first)
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        got = _libc.mmap(address, last - first, mmap.PROT_READ, flags, descriptor, first)
        if got != address:
            reason = os.strerror(ctypes.get_errno())
            raise StreamError(f"cannot map the dense weights: {reason}; use dense='anon'")
