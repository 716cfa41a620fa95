"""Writes the routing curves of `routeahead doctor`: hit rate against the cache's share of experts.

    routeahead run --forced-tokens IDS -n 390 --route-trace a.csv       # ids of held-out.txt
    python benchmarks/routing_curves.py qwen.route.csv:"Qwen3-30B-A3B, BigMoeOnEdge" a.csv:...

Each argument is a recorded routing and, behind a colon, what it is of. The number of experts is not
in a trace: `:experts` may follow, else it is the next power of two above the highest that was
routed to. Hit rates are those of the engine's own eviction.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from routeahead.config import Settings
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import replay
from routeahead.telemetry.route_trace import read_trace

TARGET = Path(__file__).parents[1] / "src" / "routeahead" / "doctor" / "routing_curves.json"
SHARES = [0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
WARMUP = 24  # decoded tokens that only fill the cache


def curve(path: Path, source: str, experts: int | None) -> dict[str, Any]:
    trace = read_trace(path)
    top_k = int(trace.slots[:, 3].max()) + 1
    highest = int(trace.slots[:, 4].max())
    n_expert = experts or 1 << highest.bit_length()
    whole = n_expert * sum(trace.expert_bytes.values())
    counted = trace.counting(WARMUP)
    points = [
        [
            share,
            round(replay(counted, int(share * whole), Policy(Settings.cache_policy)).hit_rate, 3),
        ]
        for share in SHARES
        if share >= top_k / n_expert
    ]
    points[-1][1] = 1.0  # a trace has first uses, which a cache that is full of everything has not
    return {"source": source, "experts": n_expert, "top_k": top_k, "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="+", metavar="FILE:SOURCE[:EXPERTS]")
    curves = []
    for text in parser.parse_args().trace:
        path, source, *experts = text.split(":")
        curves.append(curve(Path(path), source, int(experts[0]) if experts else None))
    lines = ",\n".join(f"  {json.dumps(one)}" for one in curves)
    TARGET.write_text(f"[\n{lines}\n]\n")
    print(TARGET.read_text())


if __name__ == "__main__":
    main()
