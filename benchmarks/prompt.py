"""How long a prompt takes to its first token, against what compute and the disk allow.

    python benchmarks/make_model.py MODEL --layers 12
    GOMP_SPINCOUNT=10000 python benchmarks/prompt.py MODEL --context 2048 --json prompt.json
    GOMP_SPINCOUNT=10000 python benchmarks/prompt.py MODEL --rows 8192 --passes 1 --cells 600:600

The bound is 1.1 times the larger of compute (the resident model's time for the same prompt, with
the same ubatch) and of what was read divided by the bandwidth, and 0.3 s. With no throttle it is
1.05 times compute. `--before` adds a model of ubatches of 512 rows that reads nothing ahead.

All models of a cell are in one process and take turns, because on virtual machines memory that is
touched for the first time costs more than the disk does; the first round of a cell is not counted.
The prompt is random tokens, another one in each pass, so that caches hold what they would hold in
a conversation.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from routeahead import Llama
from routeahead.experts.layout import MIB

SLACK_S, READ_FACTOR, COMPUTE_FACTOR = 0.3, 1.1, 1.05
BEFORE = {"ubatch": 512}


def evaluate(llm: Llama, tokens: list[int]) -> dict[str, float]:
    """Seconds of a prompt from an empty context, seconds of them waiting, and MiB read."""
    llm.reset()
    prefill = llm.counters.prefill
    stalled, read = prefill.stall_s, prefill.bytes_read
    start = time.perf_counter()
    llm.eval(tokens)
    took = time.perf_counter() - start
    return {
        "s": took,
        "stall_s": prefill.stall_s - stalled,
        "mib": (prefill.bytes_read - read) / MIB,
    }


def cell(options: argparse.Namespace, throttle: int, cache: int) -> dict[str, Any]:
    """One throttle (MiB/s; 0 for none) and cache size (MiB), in interleaved passes."""
    common = {"n_ctx": options.context, "n_threads": options.threads}
    streaming = {**common, "throttle": float(throttle), "cache_mb": cache}
    models = {"streamed": Llama(options.model, **streaming)}
    ubatch = int(models["streamed"].context_params.n_ubatch)
    if options.before:
        models["before"] = Llama(options.model, **streaming, **BEFORE)
        models["before"].source.window = 0
    if not options.no_resident:
        models["resident"] = Llama(options.model, resident=True, ubatch=ubatch, **common)
    passes: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    try:
        for index in range(options.passes + 1):
            rng = random.Random(index)
            vocabulary = models["streamed"].n_vocab()
            tokens = [rng.randrange(3, vocabulary) for _ in range(options.rows)]
            names = list(models)
            for name in names if index % 2 else reversed(names):
                found = evaluate(models[name], tokens)
                if index:
                    passes[name].append(found)
    finally:
        for llm in models.values():
            llm.close()
    return {
        "throttle": throttle, "cache_mb": cache, "rows": options.rows, "context": options.context,
        "ubatch": ubatch, "passes": passes, **bounds(passes, throttle),
    }  # fmt: skip


def bounds(passes: dict[str, list[dict[str, float]]], throttle: int) -> dict[str, list[float]]:
    """Each pass's time as a share of its bound, and of the resident model's."""
    found: dict[str, list[float]] = {"of_bound": [], "of_compute": []}
    for index, streamed in enumerate(passes["streamed"]):
        if "resident" in passes:
            compute = passes["resident"][index]["s"]
        else:
            compute = streamed["s"] - streamed["stall_s"]
        bound = COMPUTE_FACTOR * compute
        if throttle:
            bound = READ_FACTOR * max(compute, streamed["mib"] / throttle) + SLACK_S
        found["of_bound"].append(streamed["s"] / bound)
        found["of_compute"].append(streamed["s"] / compute)
    return found


def middle(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def show(record: dict[str, Any]) -> None:
    speed = f"{record['throttle']} MiB/s" if record["throttle"] else "full disk speed"
    print(
        f"{record['rows']} tokens, {speed}, cache {record['cache_mb']} MiB, ubatch "
        f"{record['ubatch']}: of the bound {middle(record['of_bound'])}, of compute "
        f"{middle(record['of_compute'])}"
    )
    for name, passes in record["passes"].items():
        columns = {key: [one[key] for one in passes] for key in passes[0]}
        print(
            f"  {name:9} {middle(columns['s'])} s, waited {middle(columns['stall_s'])} s, "
            f"{statistics.median(columns['mib']):.0f} MiB read",
            flush=True,
        )


def pair(text: str) -> tuple[int, int]:
    throttle, cache = text.split(":")
    return int(throttle), int(cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=1011)
    parser.add_argument("--context", type=int, default=0, help="default: what the prompt needs")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument(
        "--cells", type=pair, nargs="+", metavar="THROTTLE:CACHE",
        default=[(600, 600), (600, 2000), (1200, 600), (1200, 2000), (0, 600), (0, 2000)],
    )  # fmt: skip
    parser.add_argument("--before", action="store_true")
    parser.add_argument("--no-resident", action="store_true", help="it does not fit in memory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.context = options.context or (options.rows // 1024 + 1) * 1024
    records = []
    for throttle, cache in options.cells:
        records.append(cell(options, throttle, cache))
        show(records[-1])
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
