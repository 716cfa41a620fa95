"""What streaming costs when nothing is missed: resident and all-cached, in turn, in one process.

    python benchmarks/make_model.py MODEL --layers 12
    GOMP_SPINCOUNT=10000 python benchmarks/all_cached.py MODEL

Both models evaluate the same random tokens from an empty context, once a round. After the first
round every expert is in the cache; a later miss ends the run. Both are in one process, because on
virtual machines memory that is touched for the first time costs more than the disk does.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

from routeahead import Llama
from routeahead.bench.statistics import paired_ratio


def token_s(llm: Llama, tokens: list[int]) -> float:
    """Median seconds of a token, decoded from an empty context."""
    llm.reset()
    llm.phase = "decode"
    times = []
    for token in tokens:
        start = time.perf_counter()
        llm.eval([token])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("-t", "--threads", type=int, default=None)
    options = parser.parse_args()
    common = {"n_ctx": 512, "n_batch": 64, "n_threads": options.threads}
    resident = Llama(options.model, resident=True, **common)
    cached = Llama(options.model, cache_mb=resident.layout.expert_bytes // (1 << 20) + 1, **common)
    generator = random.Random(1)
    tokens = [generator.randrange(resident.n_vocab()) for _ in range(options.tokens)]
    for llm in (resident, cached):
        token_s(llm, tokens)
    misses = cached.counters.decode.misses
    times: dict[str, list[float]] = {"resident": [], "cached": []}
    for index in range(options.pairs):
        order = [("resident", resident), ("cached", cached)]
        for name, llm in order if index % 2 else reversed(order):
            times[name].append(token_s(llm, tokens))
    if cached.counters.decode.misses != misses:
        sys.exit("the cached run missed")
    ratio = paired_ratio(times["resident"], times["cached"])
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    print(
        f"GOMP_SPINCOUNT={os.environ['GOMP_SPINCOUNT']}: resident {medians['resident']:.2f} ms, "
        f"cached {medians['cached']:.2f} ms a token; speed of cached / resident: {ratio}"
    )


if __name__ == "__main__":
    main()
