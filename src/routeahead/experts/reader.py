"""Reads bytes of the model's files into memory. Knows files and offsets, not experts.

Tests and experiments put another `Reader`, which delays, reorders or fails, between the lanes and
the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import random
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from routeahead.errors import ModelError, ReadError
from routeahead.experts.layout import BLOCK, Shard

O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # absent on macOS
NO_CACHE: int = getattr(fcntl, "F_NOCACHE", 0)  # what macOS has instead

CHECK_EVERY = 64
"""Reads of a file between two looks at whether it is still the same one."""

_STRATA = 8  # parts of the model, in each of which one block is compared at a random place
_SPARE_DESCRIPTORS = 64  # for everything else that a process has open


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


def read_whole(reader: Reader, shard: int, offset: int, view: memoryview, need: int) -> int:
    """`reader.read`, whose count is compared: whoever accepts bytes reads them through this.

    Raises:
        ReadError: the read failed, or brought fewer bytes than `need` or more than `view` holds.
    """
    got = reader.read(shard, offset, view, need)
    if not need <= got <= len(view):
        raise ReadError(
            f"file {shard + 1} of the model: reading {need} bytes at offset {offset} "
            f"brought {got}; nothing of them is used"
        )
    return got


class _Identity(NamedTuple):
    """What stays the same as long as nobody writes to a file or puts another in its place."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, place: os.stat_result) -> _Identity:
        return cls(place.st_dev, place.st_ino, place.st_size, place.st_mtime_ns)


class FileReader:
    """Reads with `preadv`, through O_DIRECT if the file system then gives the same bytes.

    A file is opened when it is first read, because llama.cpp holds all files of a set open while
    it loads: with one descriptor each, both fit where llama.cpp alone fits.

    Hand-over between lanes: `_opening` guards the list of descriptors. An entry is written once,
    before it is used, so a read takes the lock only where the file has not been opened yet.

    Attributes:
        direct: whether O_DIRECT is in use.
        fallback: why it is not, if it was asked for; empty otherwise.
    """

    def __init__(self, shards: Sequence[Shard], *, direct: bool = True) -> None:
        """
        Raises:
            ModelError: a file cannot be opened, or changed since its directory was read.
        """
        _allow_descriptors(len(shards))
        self._shards = shards
        self._descriptors = [-1] * len(shards)
        self._opening = threading.Lock()
        self._identities = [_identity(shard) for shard in shards]
        self._reads = [itertools.count() for _ in shards]  # `next` is atomic
        self._changed: dict[int, str] = {}
        self.fallback = _direct_fault(shards) if direct else ""
        self.direct = direct and not self.fallback
        self._no_cache = direct and not O_DIRECT and NO_CACHE > 0

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        descriptor, got = self._descriptors[shard], 0
        try:
            if descriptor < 0:
                descriptor = self._open(shard)
            if self._changed or next(self._reads[shard]) % CHECK_EVERY == 0:
                self._check_unchanged(shard, descriptor, offset, need)
            while got < need:
                count = os.preadv(descriptor, [view[got:] if got else view], offset + got)
                end = got + count
                # An O_DIRECT read may stop short inside a block; it can only go on at its start.
                if end < need and self.direct:
                    end = end // BLOCK * BLOCK
                if end <= got:  # no further: the file ends here, be it inside a block
                    raise self._error(
                        shard, offset, need, f"the file ends {need - got - count} bytes early"
                    )
                got = end
        except OSError as error:
            raise self._error(shard, offset, need, error.strerror or str(error)) from error
        return got

    def _open(self, shard: int) -> int:
        with self._opening:
            if self._descriptors[shard] < 0:
                flags = os.O_RDONLY | (O_DIRECT if self.direct else 0)
                descriptor = _open(self._shards[shard], flags)
                if self._no_cache:
                    fcntl.fcntl(descriptor, NO_CACHE, 1)
                self._descriptors[shard] = descriptor
            return self._descriptors[shard]

    def _check_unchanged(self, shard: int, descriptor: int, offset: int, need: int) -> None:
        """
        Raises:
            ReadError: the file was written to, cut or replaced; so will each later read.
        """
        if shard not in self._changed:
            known = self._identities[shard]
            with contextlib.suppress(FileNotFoundError):  # deleted: the open file is still whole
                if _Identity.of(os.stat(self._shards[shard].path)) != known:
                    self._changed[shard] = "the file changed while it was in use"
            now = _Identity.of(os.fstat(descriptor))
            if now.size < known.size:
                self._changed[shard] = f"the file ends {known.size - now.size} bytes early"
            elif now != known:
                self._changed[shard] = "the file changed while it was in use"
        if shard in self._changed:
            raise self._error(shard, offset, need, f"{self._changed[shard]}; load the model again")

    def _error(self, shard: int, offset: int, need: int, why: str) -> ReadError:
        path = self._shards[shard].path
        return ReadError(f"{path}: reading {need} bytes at offset {offset} failed: {why}")

    def close(self) -> None:
        for descriptor in self._descriptors:
            if descriptor >= 0:
                os.close(descriptor)
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


def _identity(shard: Shard) -> _Identity:
    try:
        identity = _Identity.of(os.stat(shard.path))
    except OSError as error:
        raise ModelError(f"{shard.path}: cannot open it: {error.strerror}") from None
    if identity.size != shard.size:
        raise ModelError(f"{shard.path}: changed while the model was loaded; load it again")
    return identity


def _allow_descriptors(count: int) -> None:
    """Raises this process's limit of open files as far as it may, for llama.cpp's `count` files
    beside ours: it opens all files of a set to load them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + _SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _open(shard: Shard, flags: int) -> int:
    """
    Raises:
        ModelError: too many files are open.
        OSError: any other reason.
    """
    try:
        return os.open(shard.path, flags)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    raise ModelError(
        f"{shard.path}: cannot open it: this process has {limit} files open and may have no more; "
        f"raise the limit (ulimit -n {2 * limit}) or join the shards"
    )


def _direct_fault(shards: Sequence[Shard]) -> str:
    """Compares blocks of every file, read both ways; the reason to mistrust O_DIRECT, or ''.

    Raises:
        ModelError: a file cannot be opened.
    """
    if not O_DIRECT:
        return "this system has no O_DIRECT" + (", F_NOCACHE is set instead" if NO_CACHE else "")
    for shard, offsets in _sample(shards):
        try:
            with _opened(shard, O_DIRECT) as direct, _opened(shard, 0) as buffered:
                if not all(_same(direct, buffered, offset) for offset in offsets):
                    return f"{shard.path} reads differently through O_DIRECT"
        except OSError as error:
            return f"O_DIRECT refused: {error.strerror}"
    return ""


def _sample(shards: Sequence[Shard]) -> Iterator[tuple[Shard, list[int]]]:
    """Offsets of blocks to compare: both ends of each file, and random ones between them, other
    ones at each start, spread so that no large part of the model is left out."""
    strata = -(-_STRATA // len(shards))
    for shard in shards:
        blocks = -(-shard.size // BLOCK)
        bounds = [blocks * part // strata for part in range(strata + 1)]
        inner = [random.randrange(a, b) for a, b in itertools.pairwise(bounds) if b > a]
        yield shard, [block * BLOCK for block in {0, *inner, max(0, blocks - 1)}]


def _same(direct: int, buffered: int, offset: int) -> bool:
    with mmap.mmap(-1, BLOCK) as page, memoryview(page) as view:
        count = os.preadv(direct, [view], offset)
        return bytes(view[:count]) == os.pread(buffered, BLOCK, offset)


@contextlib.contextmanager
def _opened(shard: Shard, flags: int) -> Iterator[int]:
    descriptor = _open(shard, os.O_RDONLY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
