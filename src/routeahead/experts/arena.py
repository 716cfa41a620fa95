"""Where expert bytes live: an address range shaped like the file, and the pages that fill it.

The arena reserves, for every shard, as many addresses as the file has bytes and puts file offset x
at base + x. A read of whole blocks therefore lands in place: no copy, O_DIRECT's alignment holds
although GGUF aligns tensors to 32 bytes only, and blocks at the edge of a slice, which its
neighbours share, get the bytes that the neighbours would have put there.

Memory is what is *committed* in that range. Evicting an expert does not return its pages to the
kernel: they are moved (mremap) under the next expert that is read. A read into fresh pages costs
twice what a read into committed ones costs, and pages cut from huge pages stay physically
contiguous, which saves the block layer work (docs/architecture.md, "Pages", has the figures).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

from routeahead.errors import StreamError
from routeahead.experts.layout import BLOCK, ExpertTensor, Shard, ceil_block, floor_block

HUGE = 2 << 20
_CHUNK = 32 << 20  # bytes of committed reserve taken from the kernel at a time

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MOVE_KEEPING_SOURCE = 1 | 2 | 4  # MAYMOVE | FIXED | DONTUNMAP (Linux 5.7)
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 4, 14, 23
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if hasattr(_libc, "mremap"):
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip


class Pages(NamedTuple):
    """A page-aligned range: address and length in bytes."""

    address: int
    nbytes: int


class Reservation:
    """An anonymous mapping of which nothing is committed until it is written."""

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        self._nbytes = ceil_block(nbytes) + HUGE
        self._closed = False
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
        _release(self.range)
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mmap.close()


def _is_linux() -> bool:
    return sys.platform == "linux"


class Arena:
    """Address ranges for all shards, and the free pages that wait for their next slice.

    Free pages are still where their last slice was. `_lock` guards the list of them and every
    move: a slice that is read again finds its own pages either in place or gone, and no read moves
    pages that another one has just filled. The evaluation thread takes the lock once a layer, to
    give pages; a lane takes it once a read, to take and move them.

    Attributes:
        recycling: whether pages are moved; False if the kernel cannot.
        unmovable: moves that the kernel refused (pages were committed anew instead).
        free_bytes: bytes of free pages now.
    """

    def __init__(self, shards: Sequence[Shard], *, poison: bool = False) -> None:
        """Reserves the addresses.

        With `poison` (for tests), an expert's pages cannot be accessed before `provide` or after
        `give`, so that a missing wait is a crash and not a wrong token.
        """
        self._shards = [Reservation(s.size) for s in shards]
        self._poison = poison
        self._lock = threading.Lock()
        self._free: dict[int, dict[int, None]] = {}  # length → addresses, oldest first
        self._chunks: list[Reservation] = []
        self._bump = self._bump_end = self._populated = 0
        self.free_bytes = 0
        self.unmovable = 0
        self.recycling = _can_move()
        if poison:
            for shard in self._shards:
                _protect(shard.range, _NO_ACCESS)

    def address(self, shard: int, offset: int) -> int:
        """Address of byte `offset` of file `shard`."""
        return self._shards[shard].address + offset

    def blocks(self, shard: int, start: int, end: int) -> tuple[int, memoryview]:
        """The whole blocks around file range [start, end): their offset and memory."""
        first, last = floor_block(start), ceil_block(end)
        return first, self._shards[shard].view[first:last]

    def inner(self, shard: int, start: int, end: int) -> Pages:
        """The pages that lie wholly inside file range [start, end); possibly none."""
        first, last = ceil_block(start), floor_block(end)
        return Pages(self.address(shard, first), max(0, last - first))

    def give(self, slices: Sequence[Pages]) -> None:
        """Frees the pages of slices that were evicted."""
        with self._lock:
            for pages in slices:
                if not pages.nbytes:
                    continue
                if self._poison:
                    _protect(pages, _NO_ACCESS)
                if self.recycling:
                    self._free.setdefault(pages.nbytes, {})[pages.address] = None
                    self.free_bytes += pages.nbytes
                else:
                    _release(pages)

    def provide(self, inner: Pages, blocks: memoryview) -> None:
        """Puts committed pages under a slice that is about to be read.

        Args:
            inner: the pages that belong to the slice alone.
            blocks: the memory of its whole blocks, shared edges included.
        """
        if inner.nbytes and self.recycling:
            with self._lock:
                self._take(inner)
        if self._poison:
            address = ctypes.addressof(ctypes.c_char.from_buffer(blocks))
            _protect(Pages(address, len(blocks)), _READ_WRITE)

    def _take(self, target: Pages) -> None:
        """Puts pages under `target`.

        Its own if they are still there, else free ones of the same length, else of another length,
        else new ones.
        """
        same = self._free.get(target.nbytes)
        if same and target.address in same:
            del same[target.address]
            self.free_bytes -= target.nbytes
            return
        length = target.nbytes if same else next((n for n, a in self._free.items() if a), 0)
        if not length:
            self._move(self._new_pages(target.nbytes), target)
            return
        donor = Pages(next(iter(self._free[length])), length)
        del self._free[length][donor.address]
        self.free_bytes -= length
        self._move(donor, target)

    def _move(self, donor: Pages, target: Pages) -> None:
        length = min(donor.nbytes, target.nbytes)
        moved = _libc.mremap(
            donor.address, length, length, _MREMAP_MOVE_KEEPING_SOURCE, target.address
        )
        if moved != target.address:  # too many mappings: vm.max_map_count
            self.unmovable += 1
            length = 0
        _release(Pages(donor.address + length, donor.nbytes - length))

    def _new_pages(self, nbytes: int) -> Pages:
        """Committed pages, cut from huge ones if the kernel has any."""
        if self._bump + nbytes > self._bump_end:
            chunk = Reservation(max(_CHUNK, nbytes), huge=True)
            self._chunks.append(chunk)
            self._bump = self._populated = chunk.address
            self._bump_end = chunk.address + chunk.range.nbytes
        pages = Pages(self._bump, nbytes)
        self._bump += nbytes
        if self._bump > self._populated:
            # Committed before it is moved: moving addresses without memory would move nothing.
            grow = min(self._bump_end, -(-self._bump // HUGE) * HUGE) - self._populated
            _libc.madvise(self._populated, grow, _MADV_POPULATE_WRITE)
            self._populated += grow
        return pages

    def trim(self, limit: int) -> None:
        """Returns free pages to the kernel until at most `limit` bytes of them are left."""
        if self.free_bytes <= limit:
            return
        with self._lock:
            for length, addresses in self._free.items():
                while addresses and self.free_bytes > limit:
                    _release(Pages(addresses.popitem()[0], length))
                    self.free_bytes -= length

    def reset(self, tensors: Sequence[ExpertTensor]) -> None:
        """Forgets all expert pages, whatever state a fault left. No read may be in flight."""
        for tensor in tensors:
            end = tensor.offset + tensor.n_expert * tensor.expert_bytes
            pages = self.inner(tensor.shard, tensor.offset, end)
            if self._poison:
                _protect(pages, _NO_ACCESS)
            _release(pages)
        self._free.clear()
        self._chunks.clear()
        self._bump = self._bump_end = self._populated = self.free_bytes = 0

    def close(self) -> None:
        """Gives all memory back. No read may be in flight, and nothing may compute any more."""
        self.recycling = False
        self._free.clear()
        for reservation in (*self._shards, *self._chunks):
            reservation.close()
        self._chunks.clear()

    def unpoison(self) -> None:
        """Makes everything accessible: a faulted graph may still run a product before it stops."""
        if self._poison:
            for shard in self._shards:
                _protect(shard.range, _READ_WRITE)

    # --- the dense weights' ---

    def expose(self, shard: int, start: int, end: int) -> memoryview:
        """Makes the whole blocks around a range of dense weights accessible, and returns them."""
        _, view = self.blocks(shard, start, end)
        if self._poison:
            pages = Pages(self.address(shard, floor_block(start)), len(view))
            _protect(pages, _READ_WRITE)
        return view

    def map_file(self, shard: int, start: int, end: int, descriptor: int) -> None:
        """Maps the pages of a range of dense weights from the file, privately and lazily.

        Raises:
            StreamError: the kernel refused.
        """
        first, last = floor_block(start), ceil_block(end)
        address = self.address(shard, first)
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        # Writable, because an expert read next to it rewrites the block that both share.
        got = _libc.mmap(address, last - first, _READ_WRITE, flags, descriptor, first)
        if got != address:
            reason = os.strerror(ctypes.get_errno())
            raise StreamError(f"cannot map the dense weights: {reason}; use dense='anon'")


def _release(pages: Pages) -> None:
    if pages.nbytes:
        _libc.madvise(pages.address, pages.nbytes, _MADV_DONTNEED)


def _protect(pages: Pages, protection: int) -> None:
    if pages.nbytes:
        _libc.mprotect(pages.address, pages.nbytes, protection)


def _can_move() -> bool:
    """Whether committed pages keep their content when moved between anonymous mappings."""
    if not (_is_linux() and hasattr(_libc, "mremap")):
        return False
    source, target = Reservation(BLOCK), Reservation(BLOCK)
    source.view[:4] = b"move"
    got = _libc.mremap(source.address, BLOCK, BLOCK, _MREMAP_MOVE_KEEPING_SOURCE, target.address)
    return bool(got == target.address and bytes(target.view[:4]) == b"move" and source.view[0] == 0)
