"""Hand-made routing traces for the test-suite."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from routeahead.telemetry.route_trace import Batch, RouteTrace

HEADER = "# route_trace v1\n# layer=0 expert_bytes=30 dense_bytes=9\n# layer=2 expert_bytes=60\n"
NAMES = "turn,phase,step,layer,slot,expert,weight"
# Two prompt tokens (the last layer routes one of them), two decoded ones.
ROWS = [
    *[(0, 0, 0, 0, 7), (0, 0, 0, 1, 3), (0, 1, 0, 0, 3), (0, 1, 0, 1, 5)],
    *[(0, 1, 2, 0, 4), (0, 1, 2, 1, 1)],
    *[(1, 2, 0, 0, 5), (1, 2, 0, 1, 7), (1, 2, 2, 0, 1), (1, 2, 2, 1, 0)],
    *[(1, 3, 0, 0, 7), (1, 3, 0, 1, 5), (1, 3, 2, 0, 2), (1, 3, 2, 1, 1)],
]


def csv_text(rows: Sequence[Sequence[int]] = ROWS) -> str:
    body = "".join(f"0,{','.join(map(str, row))},0.5\n" for row in rows)
    return f"{HEADER}{NAMES}\n{body}"


def decode_trace(tokens: Sequence[Sequence[Sequence[int]]], sizes: Sequence[int]) -> RouteTrace:
    """A trace without a prompt: `tokens` [token][layer] → experts."""
    batches = [
        Batch("decode", step, layer, tuple(experts))
        for step, layers in enumerate(tokens)
        for layer, experts in enumerate(layers)
    ]
    return RouteTrace(dict(enumerate(sizes)), batches)


def one_by_one(experts: str) -> RouteTrace:
    """One layer, one expert a token, 10 bytes each; "abca" are experts 0, 1, 2, 0."""
    return decode_trace([[[ord(name) - ord("a")]] for name in experts], [10])


def random_trace(seed: int, *, sizes: Sequence[int], tokens: int, experts: int = 6) -> RouteTrace:
    """Begins with a prompt whose batches are larger than a token's."""
    rng = random.Random(seed)

    def batch(phase: Any, step: int, layer: int, count: int) -> Batch:
        return Batch(phase, step, layer, tuple(rng.sample(range(experts), count)))

    layers = range(len(sizes))
    batches = [batch("prefill", 0, layer, experts - 2) for layer in layers]
    batches += [batch("decode", 1 + t, layer, 2) for t in range(tokens) for layer in layers]
    return RouteTrace(dict(enumerate(sizes)), batches)
