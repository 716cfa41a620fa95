"""Expert substitution: where the router hardly cares, take an expert that is in memory.

Lossy, and dependent on what the cache holds. (Source: "Mixture of Cache-Conditional Experts for
Efficient Mobile Device Inference", arXiv:2412.00099, whose Cache-Prior raises the logits of
cached experts by a share of their range.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routeahead.routing.policy import Routing


class Substitute:
    """Raises the selection scores of resident experts, and takes the top-k again.

    The raise is `margin` times the token's score range, so a near-tie goes to the resident expert
    and a confident choice stays. The weights remain what the router gives to the chosen ones. A
    `RoutingPolicy`; decode only.

    Attributes:
        slots, substituted: seen, and those given to another expert than the router's.
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self.slots = self.substituted = 0

    def commit(self, routing: Routing) -> bool:
        if routing.phase != "decode" or not len(routing.ids):
            return False
        changed = 0
        for row, scores in zip(routing.ids, routing.scores(), strict=True):
            self.slots += len(row)
            changed += self._choose(row, scores, routing)
        self.substituted += changed
        return changed > 0

    def _choose(
        self, row: npt.NDArray[np.int32], scores: npt.NDArray[np.float32], routing: Routing
    ) -> int:
        """Rewrites one row; returns how many experts in it are new."""
        finite = scores[np.isfinite(scores)]  # not the experts of groups that lost
        reach = self._margin * (finite.max() - finite.min())
        # Only these can displace one that the router chose, if they are resident and it is not.
        near = np.flatnonzero(scores >= scores[row].min() - reach)
        resident = [routing.resident(routing.layer, expert) for expert in near.tolist()]
        raised = scores[near] + reach * np.array(resident, np.float32)
        chosen = near[np.argsort(-raised, kind="stable")[: len(row)]]
        new = len(set(chosen.tolist()).difference(row.tolist()))
        if new:
            row[:] = chosen
        return new
