"""What small calls cost after large matrices have filled the CPU's caches, as between two layers.

    python benchmarks/cold_calls.py

Each call is timed after 64 MiB were read; "nothing" is what timing itself costs. Medians, µs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

ROUNDS = 60
CALLS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "thread_time": time.thread_time,
    "copy of 128 numbers": lambda: np.copyto(TARGET, SCORES),
    "argsort of 128 numbers": lambda: np.argsort(-SCORES, kind="stable"),
}
SCORES = np.random.default_rng(0).random(128, np.float32)
TARGET = np.empty_like(SCORES)


def main() -> None:
    stream = np.zeros(64 << 20, np.uint8)
    for name, call in CALLS.items():
        cold, warm = [], []
        for _ in range(ROUNDS):
            stream.sum()
            for times in (cold, warm):
                start = time.perf_counter()
                call()
                times.append(1e6 * (time.perf_counter() - start))
        print(f"{name:<24}{statistics.median(cold):6.1f} cold {statistics.median(warm):6.1f} warm")


if __name__ == "__main__":
    main()
