"""Compares the replay with the engine: hits exactly, and the time model within its tolerance.

    python benchmarks/make_model.py MODEL --layers 12 --top-k 6 --down-q6k-layers trace
    python benchmarks/validate_replay.py MODEL TRACE

The trace routes a random model of the same shapes, so both have the same routing and bytes. The
compute time of a layer is measured in a run that is not among the cells (the middle cache, the
disk's own speed); every other figure of the time model is a setting. `docs/replay.md` has the
table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cli_json import cli_json

from routeahead.config import Settings
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import replay
from routeahead.replay.time_model import Machine, simulate
from routeahead.telemetry.route_trace import RouteTrace, read_trace

LATENCY_MS = 0.2
TOLERANCE = 0.20  # of a token
FIRST_TOKEN = 1  # the prompt begins with BOS; each letter behind it is one token


def engine_run(model: Path, trace: Path, prompt: int, tokens: int, *flags: object) -> Any:
    """Counters of a run that follows the trace."""
    report = cli_json(
        *("run", model, "-p", "a" * (prompt - FIRST_TOKEN), "--raw", "--forced-tokens", "seed:1"),
        *("-n", tokens, "--replay-routing", trace, "--force-cache", *flags),
    )
    return report["counters"]


def trace_lengths(trace: RouteTrace) -> tuple[int, int]:
    """Tokens of the prompt, decoded tokens."""
    steps = trace.slots[trace.slots[:, 0] == 0][:, 1]
    return int(steps.max()) + 1, len(trace.decoded_tokens())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--cache-mb", type=int, nargs="+", default=[300, 600, 900])
    parser.add_argument("--throttle", type=float, nargs="+", default=[400, 1000])
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    layout = read_layout(arguments.model)
    trace = read_trace(arguments.trace).first_layers(len(layout.moe_layers))
    prompt, tokens = trace_lengths(trace)
    middle = sorted(arguments.cache_mb)[len(arguments.cache_mb) // 2]
    unthrottled = engine_run(arguments.model, arguments.trace, prompt, tokens, "--cache-mb", middle)
    compute_s = unthrottled["compute_s_per_token"] / len(layout.moe_layers)
    print(f"compute {1e3 * compute_s:.2f} ms a layer", flush=True)
    rows = []
    for throttle in arguments.throttle:
        for cache_mb in arguments.cache_mb:
            found = engine_run(
                arguments.model, arguments.trace, prompt, tokens,
                "--cache-mb", cache_mb, "--throttle", throttle,
                "--throttle-latency-ms", LATENCY_MS, "--io-threads", arguments.lanes,
            )  # fmt: skip
            machine = Machine(
                bandwidth=throttle * MIB,
                compute_s=compute_s,
                latency_s=LATENCY_MS / 1e3,
                lanes=arguments.lanes,
            )
            rows.append(compare(trace, throttle, cache_mb, machine, found))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(0 if all(row["same_hits"] and row["within"] for row in rows) else 1)


def compare(
    trace: RouteTrace, throttle: float, cache_mb: int, machine: Machine, found: Any
) -> dict[str, Any]:
    result = replay(trace, cache_mb * MIB, Policy(Settings.cache_policy))
    times = simulate(trace, result.misses_by_batch, machine)
    wall = found["s_per_token"]
    off_wall = times.token_s / wall - 1
    off_stall = (times.stall_s - found["stall_s_per_token"]) / wall
    return {
        "throttle": throttle,
        "cache_mb": cache_mb,
        "hits": [result.hits, found["decode_hits"]],
        "misses": [result.misses, found["decode_misses"]],
        "same_hits": (result.hits, result.misses) == (found["decode_hits"], found["decode_misses"]),
        "token_ms": [1e3 * times.token_s, 1e3 * wall],
        "stall_ms": [1e3 * times.stall_s, 1e3 * found["stall_s_per_token"]],
        "off_token": off_wall,
        "off_stall": off_stall,
        "within": abs(off_wall) <= TOLERANCE and abs(off_stall) <= TOLERANCE,
    }


def line(row: dict[str, Any]) -> str:
    def pair(name: str) -> str:
        return "{:.1f} / {:.1f} ms".format(*row[name])

    return (
        f"{row['throttle']:.0f} MiB/s, {row['cache_mb']} MiB: hits, misses "
        f"{'equal' if row['same_hits'] else 'DIFFER'} {row['hits']} {row['misses']}; "
        f"model / engine: token {pair('token_ms')} ({row['off_token']:+.1%}), "
        f"stall {pair('stall_ms')} ({row['off_stall']:+.1%} of a token)"
    )


if __name__ == "__main__":
    main()
