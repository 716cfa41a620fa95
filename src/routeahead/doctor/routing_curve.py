"""How many of a token's experts a cache of some size has, as recorded routings had it.

`routing_curves.json` is made by `benchmarks/routing_curves.py`, and each curve says what it was
recorded on.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from routeahead.experts.layout import ModelLayout

_FILE = Path(__file__).with_name("routing_curves.json")


@dataclass(frozen=True)
class RoutingCurve:
    """Hit rate against the share of all experts' bytes that the cache holds.

    Attributes:
        points: (share, hit rate), both 0 to 1, rising.
    """

    source: str
    experts: int
    top_k: int
    points: list[tuple[float, float]]

    def hit_rate(self, share: float) -> float:
        """Share of a token's experts that are in the cache; 0 below what one token routes to."""
        if share < self.top_k / self.experts:
            return 0.0
        shares, rates = zip(*self.points, strict=True)
        return float(np.interp(share, shares, rates))

    def __str__(self) -> str:
        return f"{self.source} (top-{self.top_k} of {self.experts})"


def routing_curves() -> list[RoutingCurve]:
    """All that were recorded."""
    return [RoutingCurve(**entry) for entry in json.loads(_FILE.read_text())]


def nearest_curve(layout: ModelLayout) -> RoutingCurve:
    """The curve of the model that uses most nearly the same share of its experts for a token."""
    used = layout.n_expert_used / layout.n_expert

    def distance(curve: RoutingCurve) -> float:
        return abs(math.log(used * curve.experts / curve.top_k))

    return min(routing_curves(), key=distance)
