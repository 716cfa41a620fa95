"""Rankings that belong to one step, for the policies that are given them."""

from __future__ import annotations

from routeahead.routing.policy import Ranking
from routeahead.types import Floats, Ids


class StepRankings:
    """Keeps what was predicted in this step, and nothing of an earlier one.

    Attributes:
        serial: number of the current step.
    """

    def __init__(self) -> None:
        self.serial = 0
        self._rankings: dict[int, Ranking] = {}  # by layer, of this step

    def next_step(self) -> None:
        """A new step: nothing predicted before is of use."""
        self.serial += 1
        self._rankings.clear()

    def offer(self, serial: int, layer: int, ids: Ids, probabilities: Floats | None = None) -> bool:
        """Rankings (rows, top_k) for `layer`, best first; False if they are of another step."""
        if serial != self.serial:
            return False
        self._rankings[layer] = Ranking(ids, probabilities)
        return True

    def take(self, layer: int) -> Ranking | None:
        """The layer's rankings, once; None if there are none."""
        return self._rankings.pop(layer, None)

    def rows(self, layer: int) -> int:
        """Rows of the layer's rankings; 0 if there are none."""
        return len(self._rankings[layer].ids) if layer in self else 0

    def __contains__(self, layer: object) -> bool:
        return layer in self._rankings
