"""Route-ahead: a decoded token's experts are the ones predicted N layers earlier.

The selection of MoE layer L is replaced by the ranking that L's own router gives on the hidden
state that entered the router N MoE layers earlier, in the same token. It is known N layers before
it is used, and because it is then *committed*, a read that it causes is never wasted. The output
changes: how often the router would have chosen the same is counted. (Algorithm: route-ahead of
BigMoeOnEdge.)

This module decides; it neither computes predictions nor reads experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from routeahead.prediction.rankings import StepRankings
from routeahead.prediction.watchdog import Watchdog
from routeahead.routing.policy import Routing
from routeahead.telemetry.counters import Phase

Reason = Literal[
    "structural", "prefill", "first_token", "unreadable", "several_rows", "late", "disarmed"
]
REASONS: tuple[Reason, ...] = (
    "structural", "prefill", "first_token", "unreadable", "several_rows", "late", "disarmed",
)  # fmt: skip

# Passing these through is how route-ahead works; passing others through is worth a look.
EXPECTED: tuple[Reason, ...] = ("structural", "prefill")


@dataclass
class Agreement:
    """Slots of committed routings; agreed are those of experts that the router had chosen as
    well, in whatever order."""

    slots: int = 0
    agreed_slots: int = 0


@dataclass
class AheadCounts:
    """Routings: one is one layer's top-k of one ubatch.

    Attributes:
        by_layer: agreement in each MoE layer.
        committed: replaced by a prediction.
        by_reason: left to the router, and why.
    """

    by_layer: dict[int, Agreement]
    committed: int = 0
    by_reason: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    @property
    def slots(self) -> int:
        return sum(one.slots for one in self.by_layer.values())

    @property
    def agreed_slots(self) -> int:
        return sum(one.agreed_slots for one in self.by_layer.values())

    @property
    def passed_through(self) -> int:
        """Routings that were to be committed and were not."""
        return sum(count for why, count in self.by_reason.items() if why not in EXPECTED)


class RouteAhead(StepRankings):
    """Commits predictions; a `RoutingPolicy`.

    A *ranking* belongs to one decode step, told by its serial number: one that was made in an
    earlier step is never committed, whatever went wrong in between.

    Attributes:
        depth: N, in MoE layers.
    """

    def __init__(self, layers: Sequence[int], depth: int, watchdog: Watchdog) -> None:
        """
        Args:
            layers: numbers of the MoE layers, in order.
            watchdog: once it has bitten, nothing is committed.
        """
        super().__init__()
        self.depth = depth
        self.counts = AheadCounts({layer: Agreement() for layer in layers})
        self._watchdog = watchdog
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._missing: dict[int, Reason] = {}  # why there is none

    def begin(self) -> None:
        super().begin()
        self._missing.clear()

    def cannot_predict(self, index: int, reason: Reason) -> None:
        """There will be no ranking for the layer at `index` in this step."""
        self._missing[index] = reason

    def commit(self, routing: Routing) -> bool:
        index, counts = self._index[routing.layer], self.counts
        reason = self._obstacle(routing.phase, index, len(routing.ids))
        if reason:
            counts.by_reason[reason] += 1
            return False
        predicted, row = self._rankings.pop(index), routing.ids[0]
        counts.committed += 1
        agreement = counts.by_layer[routing.layer]
        agreement.slots += len(row)
        agreement.agreed_slots += len(set(predicted.tolist()).intersection(row.tolist()))
        row[:] = predicted
        return True

    def _obstacle(self, phase: Phase, index: int, rows: int) -> Reason | None:
        if phase == "prefill":
            return "prefill"
        if index < self.depth:
            return "structural"
        if not self._watchdog.armed:
            return "disarmed"
        if rows != 1:
            return "several_rows"
        return None if index in self._rankings else self._missing.get(index, "late")
