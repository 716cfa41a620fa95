"""The first tokens after a cold start, with idle lanes that fill the cache and without.

    python benchmarks/make_model.py MODEL --layers 12
    python benchmarks/filling.py MODEL --json filling.json

Each run is a process of its own that loads the model with a cache for all experts, rests (a person
types a prompt), and decodes random tokens, others in each pass: the worst case for a profile, which
runs leave for those after them. Both ways in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from routeahead import Llama
from routeahead.bench.statistics import paired_ratio
from routeahead.experts.layout import MIB
from routeahead.telemetry.json_file import write_json


def first_tokens(model: Path, options: argparse.Namespace) -> None:
    """One run: prints what its first tokens took."""
    llm = Llama(
        model,
        n_ctx=512,
        n_threads=options.threads,
        cache_mb=options.cache_mb or 1 << 20,
        fill_cache=options.fill,
        throttle=options.throttle,
    )
    time.sleep(options.pause)
    rng = np.random.default_rng(options.seed)
    tokens = rng.integers(3, llm.n_vocab(), options.tokens + 1).tolist()
    llm.eval(tokens[:1])
    start = time.perf_counter()
    with llm.decoding():
        for token in tokens[1:]:
            llm.eval([token])
    seconds = time.perf_counter() - start
    decode, source = llm.counters.decode, llm.source
    assert source
    print(
        json.dumps(
            {
                "s": seconds,
                "stall_s": decode.stall_s,
                "mgmt_s": decode.mgmt_s,
                "load_s": llm.counters.load_s,
                "mib": decode.bytes_read / MIB,
                "filled_mib": source.lanes.idle_bytes / MIB,
                "filled": vars(source.filling.counts) if source.filling else {},
            }
        )
    )
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--pauses", type=float, nargs="+", default=[0.0, 4.0], help="seconds")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--throttle", type=float, default=0.0, help="MiB/s")
    parser.add_argument("--cache-mb", type=int, default=0, help="0: all experts")
    parser.add_argument("-t", "--threads", type=int, default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pause", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pause is not None:
        first_tokens(options.model, options)
        return
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        str(pause): {"off": [], "on": []} for pause in options.pauses
    }
    facts = {name: getattr(options, name) for name in ("throttle", "cache_mb", "tokens")}
    for number in range(options.passes):
        for pause, of in runs.items():
            for fill in (["--fill"], []) if number % 2 else ([], ["--fill"]):
                run = ["--pause", pause, "--seed", str(number), *fill]
                command = [sys.executable, *sys.argv, *run]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                of["on" if fill else "off"].append(json.loads(out))
        if options.json:
            write_json(options.json, {**facts, "runs": runs})
    for pause, of in runs.items():
        off, on = (statistics.median(run["s"] for run in of[way]) for way in ("off", "on"))
        read = {way: statistics.median(run["mib"] for run in of[way]) for way in of}
        ratio = paired_ratio(*([run["s"] for run in of[way]] for way in ("off", "on")))
        known = ratio.low is not None and ratio.high is not None
        interval = f"{ratio.low:.2f} to {ratio.high:.2f}" if known else "too few for an interval"
        print(
            f"after {pause} s: {options.tokens} tokens in {off:.2f} s, filling {on:.2f} s; "
            f"speed of filling / not: {ratio.median:.2f} ({interval}, {ratio.pairs} pairs); "
            f"{read['off']:.0f} and {read['on']:.0f} MiB read meanwhile"
        )


if __name__ == "__main__":
    main()
