"""How fast this disk gives slices of experts, read as the engine reads them."""

from __future__ import annotations

import math
import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from routeahead.experts.layout import ModelLayout, Shard, ceil_block, floor_block, range_of
from routeahead.experts.reader import FileReader, Reader, Throttled, read_whole

_ALONE_S, _TOGETHER_S = 0.4, 0.8
_WINDOW_S = 0.2  # the spread is that of the bandwidth in windows of this length
_SCRATCH = 512 << 20  # bytes of the file that stands for a model that is not here

Range = tuple[int, int, int]
"""A file of the model, and the first byte and the end of a slice in it."""


@dataclass(frozen=True)
class Disk:
    """What the lanes get.

    Attributes:
        bandwidth: bytes a second, all lanes together.
        latency_s: before a read's bytes flow, if it is the only one.
        spread: half the distance between the quartiles of the bandwidth in windows of 0.2 s, as a
            share of it.
        slice_bytes: of a read, the median.
        direct: whether the reads passed the page cache.
        drift: the logarithm of what it gave later, as a multiple of what it gave first; 0 if it was
            probed once.
    """

    bandwidth: float
    latency_s: float
    spread: float
    slice_bytes: int
    direct: bool
    drift: float = 0.0

    def and_later(self, later: Disk) -> Disk:
        """What both probes say together: the mean of their bandwidths, and how far they differ."""
        return replace(
            self,
            bandwidth=math.sqrt(self.bandwidth * later.bandwidth),
            drift=math.log(later.bandwidth / self.bandwidth),
        )


@dataclass(frozen=True)
class Throttle:
    """A slower disk to imitate; see `experts.reader.Throttled`."""

    bytes_per_s: float = 0.0
    latency_s: float = 0.0

    def around(self, reader: Reader) -> Reader:
        if not self.bytes_per_s:
            return reader
        return Throttled(reader, bytes_per_s=self.bytes_per_s, latency_s=self.latency_s)


def slices_of(layout: ModelLayout) -> list[Range]:
    """All that a model's experts are read by."""
    return [
        range_of(piece, expert) for piece in layout.pieces for expert in range(piece[0].n_expert)
    ]


def slice_bytes(layout: ModelLayout) -> int:
    """Of the model's first slice."""
    _, start, end = range_of(layout.pieces[0], 0)
    return end - start


def scratch_file(folder: Path) -> Path:
    """Writes random bytes into a new file, as large as the folder has room for, 512 MiB at most.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = folder / "scratch"
    room = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    piece = os.urandom(8 << 20)
    with path.open("wb") as file:
        for _ in range(max(1, min(_SCRATCH, room // 8) // len(piece))):
            file.write(piece)
        os.fsync(file.fileno())
    return path


def slices_in(path: Path, size: int) -> list[Range]:
    """Slices of `size` bytes, one behind the other, in a file that is no model."""
    count = max(1, path.stat().st_size // size)
    return [(0, at * size, min((at + 1) * size, path.stat().st_size)) for at in range(count)]


def probe_disk(
    shards: Sequence[Shard],
    slices: Sequence[Range],
    *,
    lanes: int,
    throttle: Throttle,
    direct: bool = True,
) -> Disk:
    """Reads random slices for about a second: alone, and then with all lanes at once.

    Raises:
        ReadError: the disk failed.
        ModelError: a file cannot be opened.
    """
    reader = FileReader(shards, direct=direct)
    try:
        slow = throttle.around(reader)
        alone = _read(slow, slices, 1, _ALONE_S)
        together = _read(slow, slices, lanes, _TOGETHER_S)
        size = int(statistics.median(end - begin for _, begin, end in slices))
        bandwidth = max(together.rate, alone.rate)
        each_s = size / alone.rate
        return Disk(
            bandwidth,
            max(0.0, each_s - size / bandwidth),
            together.spread,
            size,
            reader.direct,
        )
    finally:
        reader.close()


@dataclass(frozen=True)
class _Reading:
    rate: float
    spread: float


def _read(reader: Reader, slices: Sequence[Range], lanes: int, seconds: float) -> _Reading:
    """Reads on `lanes` threads until the time is over."""
    length = ceil_block(max(end - begin for _, begin, end in slices)) + (1 << 13)
    done: list[tuple[float, int]] = []  # (end of a read, bytes); `append` is atomic
    faults: list[BaseException] = []
    begun = time.perf_counter()

    def lane(number: int) -> None:
        rng = random.Random(number)
        try:
            with mmap.mmap(-1, length) as memory, memoryview(memory) as view:
                while time.perf_counter() - begun < seconds:
                    shard, begin, end = rng.choice(slices)
                    first = floor_block(begin)
                    with view[: ceil_block(end) - first] as part:
                        read_whole(reader, shard, first, part, end - first)
                    done.append((time.perf_counter() - begun, end - begin))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    total = max(at for at, _ in done)
    return _Reading(sum(size for _, size in done) / total, _spread(done, total))


def _spread(done: Sequence[tuple[float, int]], total: float) -> float:
    count = max(2, int(total / _WINDOW_S))
    windows = [0.0] * count
    for at, size in done:
        windows[min(int(at / total * count), count - 1)] += size
    lower, median, upper = statistics.quantiles(windows, n=4)
    return (upper - lower) / 2 / median if median else 1.0
