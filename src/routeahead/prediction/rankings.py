"""Rankings that belong to one step, for the policies that are given them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class StepRankings:
    """Keeps what was predicted in this step, and nothing that was in an earlier one.

    Attributes:
        serial: number of the current step.
    """

    def __init__(self) -> None:
        self.serial = 0
        self._rankings: dict[int, Ids] = {}  # layer's index → ids, of this step

    def begin(self) -> None:
        """A new step: nothing predicted before is of use."""
        self.serial += 1
        self._rankings.clear()

    def offer(self, serial: int, index: int, ids: Ids) -> bool:
        """A ranking (top_k,) for the layer at `index`, best first; False if of another step."""
        if serial != self.serial:
            return False
        self._rankings[index] = ids
        return True
