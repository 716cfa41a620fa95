"""How long a prompt takes to its first token, against what compute and the disk allow.

    python benchmarks/make_model.py MODEL --layers 12
    GOMP_SPINCOUNT=10000 python benchmarks/prompt.py MODEL --context 2048 --json prompt.json
    GOMP_SPINCOUNT=10000 python benchmarks/prompt.py MODEL --rows 8192 --passes 1 --cells 600:600

The bound is 1.1 times the larger of compute (the resident model's time for the same prompt, with
the same ubatch) and of what was read divided by the bandwidth, and 0.3 s. With no throttle it is
1.05 times compute. `--before` adds a model of ubatches of 512 rows that reads nothing ahead.

All models of a cell are in one process and take turns, because on virtual machines memory that is
touched for the first time costs more than the disk does; the first round of a cell is not counted.
The prompt is another one in each pass, so that caches hold what they would hold in a conversation:
random tokens, or with `--text FILE` those of a text whose words are a token each.

`--json` is written after each pass, so a run that is ended has all that it measured.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from routeahead import Llama
from routeahead.experts.layout import MIB
from routeahead.telemetry.json_file import write_json

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


def prompt(options: argparse.Namespace, number: int, vocabulary: int) -> list[int]:
    """The tokens of pass `number`.

    A text's words are numbered at random, so that it has its own frequencies and no pass has
    another one's tokens.
    """
    rng, ids = random.Random(number), range(3, vocabulary)
    if not options.text:
        return [rng.choice(ids) for _ in range(options.rows)]
    words = re.findall(r"\w+|[^\w\s]", options.text.read_text(encoding="utf-8"))
    known = list(dict.fromkeys(words))
    if len(words) < options.rows or len(known) > len(ids):
        raise SystemExit(
            f"{options.text} has {len(words)} words, {len(known)} of them different: --rows is "
            f"{options.rows}, and the model has {vocabulary} tokens"
        )
    begin = rng.randrange(len(words) - options.rows + 1)
    number_of = dict(zip(known, rng.sample(ids, len(known)), strict=True))
    return [number_of[word] for word in words[begin : begin + options.rows]]


def cell(options: argparse.Namespace, throttle: int, cache: int) -> Iterator[dict[str, Any]]:
    """One throttle (MiB/s; 0 for none) and cache size (MiB): its record after each pass."""
    common = {"n_ctx": options.context, "n_threads": options.threads}
    streaming = {**common, "throttle": float(throttle), "cache_mb": cache}
    models = {"streamed": Llama(options.model, **streaming)}
    streamed = models["streamed"]
    ubatch = int(streamed.context_params.n_ubatch)
    if options.before:
        models["before"] = Llama(options.model, **streaming, **BEFORE)
        models["before"].source.window = 0
    if not options.no_resident:
        models["resident"] = Llama(options.model, resident=True, ubatch=ubatch, **common)
    passes: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    facts = {
        "layers": len(streamed.layout.moe_layers), "text": bool(options.text),
        "throttle": throttle, "cache_mb": cache, "rows": options.rows, "context": options.context,
        "threads": options.threads, "ubatch": ubatch,
    }  # fmt: skip
    try:
        for index in range(options.passes + 1):
            tokens = prompt(options, index, streamed.n_vocab())
            names = list(models)
            found = {
                name: evaluate(models[name], tokens)
                for name in (names if index % 2 else reversed(names))
            }
            if index:
                for name in names:
                    passes[name].append(found[name])
                yield {**facts, "passes": passes, **bounds(passes, throttle)}
    finally:
        for llm in models.values():
            llm.close()


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
    parser.add_argument("--text", type=Path, help="its words, instead of random tokens")
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
    records: list[dict[str, Any]] = []
    for throttle, cache in options.cells:
        records.append({})
        for records[-1] in cell(options, throttle, cache):
            if options.json:
                write_json(options.json, records)
        show(records[-1])


if __name__ == "__main__":
    main()
