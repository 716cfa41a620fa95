"""Cold-expert dropping: an expert that is not in memory and matters little is not read.

Lossy, and dependent on what the cache holds. (The rule is BigMoeOnEdge's: a miss whose share of
the routing is below F / k.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from routeahead.telemetry.counters import Phase

Ids = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]


class DropCold:
    """Decides when a layer's final weights are known, before anything is read for it.

    Attributes:
        threshold: share of the routing below which an expert that would have to be read is dropped.
        routed, dropped: slots seen, and dropped.
    """

    def __init__(
        self, strength: float, top_k: int, *, renorm: bool, in_prefill: bool = False
    ) -> None:
        """
        Args:
            strength: F, of the mean share 1 / top_k.
            renorm: the survivors are scaled to the routing's mass.
            in_prefill: prompts lose experts too.
        """
        self.threshold = strength / top_k
        self.routed = self.dropped = 0
        self._renorm, self._in_prefill = renorm, in_prefill

    def armed(self, phase: Phase) -> bool:
        return phase == "decode" or self._in_prefill

    def drop(
        self, layer: int, ids: Ids, weights: Weights, resident: Callable[[int, int], bool]
    ) -> npt.NDArray[np.bool_]:
        """Drops from a routing, in place.

        A dropped slot's weight becomes 0 and its id that of its row's top expert, which is never
        dropped, so that no memory is touched that was not read. What one row keeps is read, so no
        other row of the batch drops it.

        Args:
            ids, weights: (rows, top-k).
            resident: (layer, expert) → whether using it causes no read.

        Returns:
            Which slots were dropped, (rows, top-k).
        """
        rows, shares = ids.tolist(), weights.tolist()
        cold = {e for e in set().union(*rows) if not resident(layer, e)} if rows else set()
        read: set[int] = set()
        for experts, row in zip(rows, shares, strict=True):
            least, top = self.threshold * sum(row), max(row)
            read.update(e for e, w in zip(experts, row, strict=True) if w >= least or w == top)
        dropped = np.zeros(ids.shape, np.bool_)
        self.routed += ids.size
        if gone := cold - read:
            for number, (experts, row) in enumerate(zip(rows, shares, strict=True)):
                slots = [slot for slot, expert in enumerate(experts) if expert in gone]
                if slots:
                    dropped[number, slots] = True
                    self._rewrite(ids[number], weights[number], slots, row)
        self.dropped += int(dropped.sum())
        return dropped

    def _rewrite(self, ids: Ids, weights: Weights, slots: list[int], row: list[float]) -> None:
        ids[slots] = ids[row.index(max(row))]
        weights[slots] = 0
        if self._renorm:
            weights *= np.float32(sum(row) / sum(weights.tolist()))
