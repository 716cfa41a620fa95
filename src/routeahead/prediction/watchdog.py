"""Checks that predictions can be trusted: can the router's own choice be reproduced?

A prediction is a layer's router applied to a hidden vector that was read out of the graph. Applied
to the layer's *own* vector it must give what the router has just chosen. If it does not, then the
vector, the router or the selection rule is not what the predictions take it for.
"""

from __future__ import annotations

from routeahead.types import Ids

WATCH_EVERY = (17, 19)  # routings; primes, so that every layer gets its turn
WATCH_SLOTS = 64  # slots that a verdict needs
WATCH_LEAST = 0.9  # share of them that must be reproduced


class Watchdog:
    """Samples decode routings, and disarms predictions for good if too few are reproduced.

    Attributes:
        every: so many decode routings to a sample.
        slots, reproduced: what was compared so far, and found equal.
        disarmed: why predictions have been given up; empty while they have not.
    """

    def __init__(self, layers: int) -> None:
        """`layers`: number of MoE layers."""
        self.every = next((w for w in WATCH_EVERY if layers % w), WATCH_EVERY[0])
        self.slots = self.reproduced = 0
        self.disarmed = ""
        self._decoded = 0
        self._window = [0, 0]  # slots and reproduced since the last verdict

    @property
    def armed(self) -> bool:
        return not self.disarmed

    def wants(self) -> bool:
        """Counts a decode routing; whether this one is a sample."""
        self._decoded += 1
        return self._decoded % self.every == 0

    def watch(self, router: Ids, reproduced: Ids) -> str:
        """Compares what a router chose with its ranking of the hidden vector that was read.

        Returns why predictions are now given up, or an empty text.
        """
        same = len(set(router.tolist()).intersection(reproduced.tolist()))
        self.slots += len(router)
        self.reproduced += same
        self._window[0] += len(router)
        self._window[1] += same
        slots, equal = self._window
        if slots < WATCH_SLOTS:
            return ""
        self._window = [0, 0]
        if equal < WATCH_LEAST * slots:
            self.disarmed = (
                f"the routers' own choices were reproduced in {equal} of {slots} slots "
                f"({equal / slots:.0%}) only"
            )
        return self.disarmed
