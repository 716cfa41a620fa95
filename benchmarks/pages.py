"""What a read costs by the kind of memory under it: `docs/architecture.md`, "Pages".

    python benchmarks/pages.py FILE

Any large file will do. Prints the median time of a read in µs, and its quartiles.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable

from routeahead.experts.arena import Pages, Reservation, release
from routeahead.experts.layout import BLOCK

Place = Callable[[int], memoryview]  # number of the read → where it goes

SLICE = 216 * BLOCK
HELD, READS, ROUNDS = 200, 600, 5


def committed(*, huge: bool) -> Reservation:
    memory = Reservation(HELD * SLICE, huge=huge)
    for offset in range(0, HELD * SLICE, BLOCK):
        memory.view[offset] = 1
    return memory


def reused(memory: Reservation) -> Place:
    """Buffers that stay committed."""
    buffers = [memory.view[i * SLICE : (i + 1) * SLICE] for i in range(HELD)]
    return lambda number: buffers[number % HELD]


def fresh(memory: Reservation) -> Place:
    """Buffers whose pages go back to the kernel before each use."""
    place = reused(memory)

    def renewed(number: int) -> memoryview:
        view = place(number)
        release(Pages.of(view))
        return view

    return renewed


def main() -> None:
    path = sys.argv[1]
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    offsets = random.Random(0).choices(range(os.path.getsize(path) // SLICE - 1), k=READS)
    ways = {
        "4 KiB pages": reused(committed(huge=False)),
        "huge pages (routeahead)": reused(committed(huge=True)),
        "pages given back and taken anew": fresh(committed(huge=False)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, place in ways.items():
            for number, index in enumerate(offsets):
                start = time.perf_counter()
                os.preadv(descriptor, [place(number)], index * SLICE)
                times[name].append(1e6 * (time.perf_counter() - start))
    print("a read of 864 KiB, µs")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"  {name:35} {middle:6.0f} (quartiles {low:.0f}-{high:.0f})")


if __name__ == "__main__":
    main()
