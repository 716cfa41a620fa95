"""The first tokens after a cold start, with idle lanes that fill the cache and without.

    python benchmarks/make_model.py MODEL --layers 12
    python benchmarks/filling.py MODEL [MODEL ...] --passes 10 --json filling.json

Each run is a process of its own that loads the model, rests (a person types a prompt) or not,
evaluates a prompt and decodes random tokens, others in each pass: the worst case for a profile,
which runs leave for those after them. First tokens are timed from the end of the rest, prompt
included; the same number of tokens after them says whether decoding is slower for it. A cell is a
model, a throttle and a cache; in each pass all cells run, both ways in turn.

`--json` is written after each pass, so a run that is ended has all that it measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from routeahead import Llama
from routeahead.bench.statistics import paired_ratio
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.telemetry.json_file import write_json

WAYS = ("off", "on")
Runs = dict[str, dict[str, list[dict[str, Any]]]]  # start → way → of each pass


class Start(NamedTuple):
    """What happens before the first tokens: a rest, and a prompt."""

    pause: float
    prompt: int

    @classmethod
    def parse(cls, text: str) -> Start:
        pause, _, prompt = text.partition(":")
        return cls(float(pause), int(prompt or 1))

    def __str__(self) -> str:
        return f"{self.pause}" if self.prompt == 1 else f"{self.pause}:{self.prompt}"


def one_run(model: Path, options: argparse.Namespace) -> None:
    """Prints what the first tokens took, and as many after them."""
    llm = Llama(
        model,
        n_ctx=512,
        n_threads=options.threads,
        cache_mb=options.cache_mb or 1 << 20,
        fill_cache=options.fill,
        throttle=options.throttle,
    )
    start: Start = options.start
    time.sleep(start.pause)
    rng = np.random.default_rng(options.seed)
    tokens = rng.integers(3, llm.n_vocab(), start.prompt + 2 * options.tokens).tolist()
    begun = time.perf_counter()
    llm.eval(tokens[: start.prompt])
    prompt_s = time.perf_counter() - begun
    seconds, mib = [], []
    with llm.decoding():
        for first in (start.prompt, start.prompt + options.tokens):
            for token in tokens[first : first + options.tokens]:
                llm.eval([token])
            seconds.append(time.perf_counter() - begun)
            mib.append((llm.counters.prefill.bytes_read + llm.counters.decode.bytes_read) / MIB)
    decode, source = llm.counters.decode, llm.source
    assert source
    print(
        json.dumps(
            {
                "s": seconds[0],
                "prompt_s": prompt_s,
                "later_s": seconds[1] - seconds[0],
                "mib": mib[0],
                "later_mib": mib[1] - mib[0],
                "stall_s": decode.stall_s,
                "mgmt_s": decode.mgmt_s,
                "load_s": llm.counters.load_s,
                "filled_mib": source.lanes.idle_bytes / MIB,
                "filled": vars(source.filling.counts) if source.filling else {},
            }
        )
    )
    llm.close()


def cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record without runs for each model, throttle and cache."""
    records = []
    for model, throttle, share in product(options.models, options.throttles, options.shares):
        layout = read_layout(model)
        runs: Runs = {str(start): {way: [] for way in WAYS} for start in options.starts}
        records.append(
            {
                "model": str(model),
                "layers": len(layout.moe_layers),
                "throttle": throttle,
                "cache_mb": 0 if share >= 1 else -(-int(layout.expert_bytes * share) // MIB),
                "tokens": options.tokens,
                "runs": runs,
            }
        )
    return records


def one_pass(options: argparse.Namespace, records: Sequence[dict[str, Any]], number: int) -> None:
    threads = ["-t", str(options.threads)] if options.threads else []
    for record in records:
        for start, of in record["runs"].items():
            for way in WAYS if number % 2 else WAYS[::-1]:
                command = [
                    sys.executable, __file__, record["model"], "--start", start,
                    "--seed", str(number), "--tokens", str(options.tokens), *threads,
                    "--throttle", str(record["throttle"]), "--cache-mb", str(record["cache_mb"]),
                    *(["--fill"] if way == "on" else []),
                ]  # fmt: skip
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                of[way].append(json.loads(out))


def show(record: dict[str, Any]) -> None:
    cache = f"{record['cache_mb']} MiB" if record["cache_mb"] else "all experts"
    speed = f"{record['throttle']:g} MiB/s" if record["throttle"] else "full disk speed"
    print(f"{record['model']}, {speed}, cache: {cache}")
    for start, of in record["runs"].items():
        pause, prompt = Start.parse(start)
        print(f"  after {pause:g} s, a prompt of {prompt}:")
        for key, what in (("s", "first"), ("later_s", "later")):
            off, on = (statistics.median(run[key] for run in of[way]) for way in WAYS)
            ratio = paired_ratio(*([run[key] for run in of[way]] for way in WAYS))
            known = ratio.low is not None and ratio.high is not None
            interval = f"{ratio.low:.2f} to {ratio.high:.2f}" if known else "too few for more"
            print(
                f"    {what} {record['tokens']} tokens: {off:.2f} s, filling {on:.2f} s; speed of "
                f"filling / not: {ratio.median:.2f} ({interval}, {ratio.pairs} pairs)",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument(
        "--starts", type=Start.parse, nargs="+", metavar="SECONDS[:PROMPT]",
        default=[Start(0.0, 1), Start(4.0, 1), Start(0.0, 128)],
        help="rest, and tokens of the prompt",
    )  # fmt: skip
    parser.add_argument("--throttles", type=float, nargs="+", default=[0.0, 600.0], help="MiB/s")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5], help="of experts")
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("-t", "--threads", type=int, default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--start", type=Start.parse, help=argparse.SUPPRESS)
    parser.add_argument("--throttle", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--cache-mb", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        one_run(options.models[0], options)
        return
    records = cells(options)
    for number in range(options.passes):
        one_pass(options, records, number)
        if options.json:
            write_json(options.json, [{**one, "model": Path(one["model"]).stem} for one in records])
    for record in records:
        show(record)


if __name__ == "__main__":
    main()
