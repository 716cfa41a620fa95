"""Cold-expert dropping: an expert that is not in memory and matters little is not read.

Lossy, and dependent on what the cache holds. (The rule is BigMoeOnEdge's: a miss whose share of
the routing is below F / k.)
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from routeahead.policies.settings import PolicySettings
from routeahead.routing.policy import Model, Policy, Routing
from routeahead.setting import POLICIES, setting
from routeahead.telemetry.counters import Totals, share
from routeahead.types import Phase


@dataclass(frozen=True)
class DropSettings(PolicySettings):
    """Settings of `DropCold`."""

    drop_cold_experts: float = setting(
        0.0,
        "Do not read a missing expert whose share of the routing is below F / top-k (lossy); "
        "0 is off.",
        POLICIES,
        low=0,
        high=1,
        metavar="F",
        asks_cache=True,
    )
    drop_renorm: bool = setting(
        False,
        "With drop_cold_experts: scale the others' weights to the routing's mass.",
        POLICIES,
        needs=("drop_cold_experts",),
    )
    drop_in_prefill: bool = setting(
        False, "With drop_cold_experts: in prompts too.", POLICIES, needs=("drop_cold_experts",)
    )
    drop_aware: bool = setting(
        True,
        "With drop_cold_experts: do not read early what a prediction says will be dropped.",
        POLICIES,
        needs=("route_ahead", "predict_prefetch"),
    )

    def make(self, model: Model) -> Policy | None:
        if not self.drop_cold_experts:
            return None
        if model.top_k <= 4:
            warnings.warn(
                f"drop_cold_experts with {model.top_k} experts a token: each of them carries much "
                "of the layer's output; judge it with `routeahead eval`",
                stacklevel=2,
            )
        return DropCold(
            self.drop_cold_experts,
            renorm=self.drop_renorm,
            in_prefill=self.drop_in_prefill,
            aware=self.drop_aware,
        )


class DropCold(Policy):
    """Decides when a layer's final weights are known, before anything is read for it.

    Attributes:
        share: an expert that would have to be read is dropped if its share of the routing is below
            this over top-k.
        aware: whether what will be dropped is not read early.
        slots, dropped: slots seen, and dropped.
    """

    name = "drop"

    def __init__(
        self,
        share: float,
        *,
        renorm: bool = False,
        in_prefill: bool = False,
        aware: bool = True,
    ) -> None:
        """
        Drops below `share` of what each expert would have if all had the same.

        Args:
            renorm: the survivors are scaled to the routing's mass.
            in_prefill: prompts lose experts too.
        """
        self.share, self.aware = share, aware
        self.slots = self.dropped = 0
        self._renorm, self._in_prefill = renorm, in_prefill

    def bind(self, model: Model) -> None:
        self._top_k = model.top_k

    def wants_weights(self, phase: Phase) -> bool:
        return phase == "decode" or self._in_prefill

    def weighted(self, routing: Routing) -> None:
        """What one row keeps is read, so no other row of the batch drops it."""
        assert routing.weights is not None
        rows, weights = routing.ids.tolist(), routing.weights.tolist()
        cold = {e for e in set().union(*rows) if not routing.resident(e)} if rows else set()
        read: set[int] = set()
        for experts, row in zip(rows, weights, strict=True):
            least, top = self.share / len(row) * sum(row), max(row)
            read.update(e for e, w in zip(experts, row, strict=True) if w >= least or w == top)
        self.slots += routing.ids.size
        if gone := cold - read:
            slots = np.array([[expert in gone for expert in row] for row in rows])
            self.dropped += int(slots.sum())
            routing.drop(slots, renorm=self._renorm)

    def count(self, totals: Totals) -> None:
        totals.dropped += self.dropped

    def report(self, decode: Totals) -> dict[str, Any]:
        threshold = self.share / self._top_k
        return {"threshold": threshold, "routed": self.slots, "dropped": self.dropped}

    def lines(self, decode: Totals) -> list[str]:
        return [
            f"moe-drop: {self.dropped}/{self.slots} ({share(self.dropped, self.slots)}), "
            f"threshold {self.share / self._top_k:.4f}"
        ]
