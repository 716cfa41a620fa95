"""Route-ahead: a decoded token's experts are the ones predicted N layers earlier.

The selection of MoE layer L is replaced by the ranking that L's own router gives on the hidden
state that entered the router N MoE layers earlier, in the same token. It is known N layers before
it is used, and because it is then *committed*, a read that it causes is never wasted. The output
changes: how often the router would have chosen the same is counted. (Algorithm: route-ahead of
BigMoeOnEdge.)

This module decides; it neither computes predictions nor reads experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

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

Ids = npt.NDArray[np.int32]

WATCH_EVERY = (17, 19)  # routings; primes, so that every layer gets its turn
WATCH_SLOTS = 64  # slots that a verdict needs
WATCH_LEAST = 0.9  # share of them that must be reproduced


@dataclass
class AheadCounts:
    """Routings: one is one layer's top-k of one ubatch.

    Attributes:
        committed: replaced by a prediction.
        by_reason: left to the router, and why.
        slots, agreed_slots: of committed routings; agreed are those of experts that the router
            had chosen as well, in whatever order.
        watched_slots, reproduced_slots: what the watchdog compared, and found equal.
        disarmed: why route-ahead has stopped itself; empty while it has not.
    """

    committed: int = 0
    by_reason: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    slots: int = 0
    agreed_slots: int = 0
    watched_slots: int = 0
    reproduced_slots: int = 0
    disarmed: str = ""

    @property
    def passed_through(self) -> int:
        """Routings that were to be committed and were not."""
        return sum(count for why, count in self.by_reason.items() if why not in EXPECTED)


class RouteAhead:
    """Commits predictions; a `RoutingPolicy`.

    A *ranking* belongs to one decode step, told by its serial number: one that was made in an
    earlier step is never committed, whatever went wrong in between.

    Attributes:
        depth: N, in MoE layers.
        serial: number of the current step.
        watch_every: every so many decode routings the watchdog wants to see one.
    """

    def __init__(self, layers: list[int], depth: int) -> None:
        self.depth = depth
        self.serial = 0
        self.counts = AheadCounts()
        self.watch_every = next((w for w in WATCH_EVERY if len(layers) % w), WATCH_EVERY[0])
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._rankings: dict[int, Ids] = {}  # layer's index → ids, of this step
        self._missing: dict[int, Reason] = {}  # why there is none
        self._decoded = 0
        self._window = [0, 0]  # slots watched and reproduced since the last verdict

    @property
    def armed(self) -> bool:
        return not self.counts.disarmed

    def begin(self) -> None:
        """A new step: nothing predicted before is of use."""
        self.serial += 1
        self._rankings.clear()
        self._missing.clear()

    def offer(self, serial: int, index: int, ids: Ids) -> bool:
        """A ranking (top_k,) for the layer at `index`, best first; False if of another step."""
        if serial != self.serial:
            return False
        self._rankings[index] = ids
        return True

    def offered(self, index: int) -> bool:
        return index in self._rankings

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
        counts.slots += len(row)
        counts.agreed_slots += len(set(predicted.tolist()).intersection(row.tolist()))
        row[:] = predicted
        return True

    def _obstacle(self, phase: Phase, index: int, rows: int) -> Reason | None:
        if phase == "prefill":
            return "prefill"
        if index < self.depth:
            return "structural"
        if not self.armed:
            return "disarmed"
        if rows != 1:
            return "several_rows"
        return None if index in self._rankings else self._missing.get(index, "late")

    # --- the watchdog ---

    def watches(self) -> bool:
        """Counts a decode routing; whether the watchdog wants to see this one."""
        self._decoded += 1
        return self._decoded % self.watch_every == 0

    def watch(self, router: Ids, reproduced: Ids) -> str:
        """Compares what the router chose with what the layer's own gate gives on the row read.

        Returns why route-ahead has now disarmed itself, or an empty text. Equal sets are expected:
        both are computed from the same row. Anything else means that the row, the gate or the
        selection rule is not what the predictions take it for, and that they are worthless.
        """
        same = len(set(router.tolist()).intersection(reproduced.tolist()))
        self.counts.watched_slots += len(router)
        self.counts.reproduced_slots += same
        self._window[0] += len(router)
        self._window[1] += same
        slots, equal = self._window
        if slots < WATCH_SLOTS:
            return ""
        self._window = [0, 0]
        if equal < WATCH_LEAST * slots:
            self.counts.disarmed = (
                f"the routers' own choices were reproduced in {equal} of {slots} slots "
                f"({equal / slots:.0%}) only"
            )
        return self.counts.disarmed
