"""Rankings that belong to one step, for the policies that are given them."""

from __future__ import annotations

from routeahead.types import Ids


class StepRankings:
    """Keeps what was predicted in this step, and nothing of an earlier one.

    Attributes:
        serial: number of the current step.
    """

    def __init__(self) -> None:
        self.serial = 0
        self._rankings: dict[int, Ids] = {}  # by layer, of this step

    def next_step(self) -> None:
        """A new step: nothing predicted before is of use."""
        self.serial += 1
        self._rankings.clear()

    def offer(self, serial: int, layer: int, ids: Ids) -> bool:
        """Rankings (rows, top_k) for `layer`, best first; False if they are of another step."""
        if serial != self.serial:
            return False
        self._rankings[layer] = ids
        return True

    def take(self, layer: int) -> Ids | None:
        """The layer's rankings, once; None if there are none."""
        return self._rankings.pop(layer, None)

    def __contains__(self, layer: object) -> bool:
        return layer in self._rankings
