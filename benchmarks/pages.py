"""What a read costs by the kind of memory under it: `docs/architecture.md`, "Pages".

    python benchmarks/pages.py FILE

Any large file will do. Prints the median time of a read in µs, and its quartiles.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from routeahead.experts import arena
from routeahead.experts.arena import Pages, Reservation
from routeahead.experts.layout import BLOCK, Shard

Place = Callable[[int, int], memoryview]  # (number of the read, offset) → where it goes

SLICE = 216 * BLOCK
HELD, READS, ROUNDS = 200, 600, 3


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def slots(*, huge: bool) -> list[memoryview]:
    """Buffers that stay committed: no page is ever moved or given back."""
    memory = Reservation(HELD * SLICE, huge=huge)
    for offset in range(0, HELD * SLICE, BLOCK):
        memory.view[offset] = 1
    return [memory.view[i * SLICE : (i + 1) * SLICE] for i in range(HELD)]


def reused(buffers: list[memoryview]) -> Place:
    def place(number: int, _offset: int) -> memoryview:
        return buffers[number % HELD]

    return place


def in_place(path: str, size: int, *, recycle: bool) -> Place:
    """At the file's own offset, as the arena does; the oldest of HELD slices makes room."""
    area = arena.Arena([Shard(Path(path), size)])
    area.recycling = recycle
    held: deque[int] = deque()

    def place(_number: int, offset: int) -> memoryview:
        if len(held) == HELD:
            oldest = held.popleft()
            if oldest not in held:
                area.give([area.inner(0, oldest, oldest + SLICE)])
        _, view = area.blocks(0, offset, offset + SLICE)
        if offset not in held:
            area.provide(Pages(address_of(view), SLICE), view)
        held.append(offset)
        return view

    return place


def main() -> None:
    path = sys.argv[1]
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = os.path.getsize(path)
    offsets = random.Random(0).choices(range(size // SLICE - 1), k=READS)
    ways = {
        "reused committed buffers, 4 KiB pages": reused(slots(huge=False)),
        "reused committed buffers, huge pages": reused(slots(huge=True)),
        "fresh pages, given back on eviction": in_place(path, size, recycle=False),
        "pages moved from the evicted slice (routeahead)": in_place(path, size, recycle=True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, place in ways.items():
            for number, index in enumerate(offsets):
                start = time.perf_counter()
                view = place(number, index * SLICE)
                os.preadv(descriptor, [view], index * SLICE)
                times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        low, middle, high = (1e6 * q for q in statistics.quantiles(seconds, n=4))
        print(f"{name:50} {middle:6.0f} µs (quartiles {low:.0f}-{high:.0f})")


if __name__ == "__main__":
    main()
