"""Mistrust of one's own predictions: can the router's choice be reproduced at all?

A prediction is a layer's gate applied to a hidden row that was read out of the graph. Applied to
the layer's *own* row it must give what the router has just chosen. Where it does not, the row, the
gate or the selection rule is not what the predictions take it for, and they are worthless.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

WATCH_EVERY = (17, 19)  # routings; primes, so that every layer gets its turn
WATCH_SLOTS = 64  # slots that a verdict needs
WATCH_LEAST = 0.9  # share of them that must be reproduced


class Watchdog:
    """Samples decode routings, and bites once.

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
        """Compares what the router chose with what its gate gives on the row that was read.

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
