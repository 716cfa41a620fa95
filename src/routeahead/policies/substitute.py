"""Expert substitution: if the router hardly cares, take an expert that is in memory.

Lossy, and dependent on what the cache holds. (Source: "Mixture of Cache-Conditional Experts for
Efficient Mobile Device Inference", arXiv:2412.00099, whose Cache-Prior raises the logits of
cached experts by a share of their range.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from routeahead.policies.settings import PolicySettings
from routeahead.routing.policy import Model, Policy, Routing
from routeahead.setting import POLICIES, setting
from routeahead.telemetry.counters import Totals, share
from routeahead.types import Floats, Ids


@dataclass(frozen=True)
class SubstituteSettings(PolicySettings):
    """Settings of `Substitute`."""

    expert_substitute: float = setting(
        0.0,
        "Raise resident experts' selection scores by M times the token's score range (lossy); "
        "0 is off.",
        POLICIES,
        low=0,
        high=1,
        metavar="M",
        asks_cache=True,
        excludes={"replay_routing": "a forced routing cannot be chosen again"},
    )

    def make(self, model: Model) -> Policy | None:
        return Substitute(self.expert_substitute) if self.expert_substitute else None


class Substitute(Policy):
    """Raises the selection scores of resident experts, and takes the top-k again, in decode.

    The raise is `margin` times the token's score range, so a near-tie goes to the resident expert
    and a confident choice stays. The weights remain what the router gives to the chosen ones.

    Attributes:
        slots, substituted: seen, and those given to another expert than the router's.
    """

    name = "substitute"

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self.slots = self.substituted = 0

    def routed(self, routing: Routing) -> None:
        if routing.phase != "decode" or not len(routing.ids):
            return
        ranked = routing.scores()
        if ranked is None:
            return
        for row, scores in enumerate(ranked):
            ids = routing.ids[row]
            chosen = self._choose(ids, scores, routing)
            new = len(set(chosen.tolist()).difference(ids.tolist()))
            self.slots += len(ids)
            self.substituted += new
            if new:
                routing.choose(chosen, row)

    def _choose(self, ids: Ids, scores: Floats, routing: Routing) -> Ids:
        """One row's experts (top_k,), with those in memory preferred."""
        finite = scores[np.isfinite(scores)]  # not the experts of groups that lost
        reach = self._margin * (finite.max() - finite.min())
        # Only these can displace one that the router chose, if they are resident and it is not.
        near = np.flatnonzero(scores >= scores[ids].min() - reach)
        resident = [routing.resident(expert) for expert in near.tolist()]
        raised = scores[near] + reach * np.array(resident, np.float32)
        chosen: Ids = near[np.argsort(-raised, kind="stable")[: len(ids)]].astype(np.int32)
        return chosen

    def report(self, decode: Totals) -> dict[str, Any]:
        return {"slots": self.slots, "substituted": self.substituted}

    def lines(self, decode: Totals) -> list[str]:
        part = share(self.substituted, self.slots)
        return [f"moe-substitute: {self.substituted}/{self.slots} slots ({part}) given away"]
