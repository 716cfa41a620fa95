"""Which matrix predicts a layer best, on documents that none of them was fitted on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from routeahead.calibration.moments import Pair
from routeahead.prediction.gates import Gate
from routeahead.routing.policy import Ranker
from routeahead.types import Floats, Ids


class Scoring:
    """Counts for each pair and candidate matrix the slots that it predicts right."""

    def __init__(self, ranker: Ranker, penalties: Sequence[float]) -> None:
        self._ranker, self._penalties = ranker, penalties
        self._into: dict[int, list[Pair]] = {}
        self._from: dict[int, list[Pair]] = {}
        self._matrices: dict[Pair, list[Floats]] = {}
        self._right: dict[Pair, list[int]] = {}
        self._slots: dict[Pair, int] = {}
        self._logits: dict[Pair, list[Floats]] = {}  # of the batch, until the target is there

    def add(self, pair: Pair, candidates: list[Floats]) -> None:
        """Candidates (n_expert, width): the layer's own router, then one for each penalty."""
        self._matrices[pair], self._right[pair] = candidates, [0] * len(candidates)
        self._slots[pair] = 0
        self._into.setdefault(pair.target, []).append(pair)
        self._from.setdefault(pair.source, []).append(pair)

    def seen(self, layer: int, hidden: Floats, ids: Ids) -> None:
        """As `Observer.seen`."""
        chosen = [set(row) for row in ids.tolist()]
        for pair in self._into.get(layer, ()):
            self._slots[pair] += ids.size
            for index, logits in enumerate(self._logits.pop(pair)):
                self._right[pair][index] += self._agreed(layer, logits, chosen)
        for pair in self._from.get(layer, ()):
            self._logits[pair] = [hidden @ matrix.T for matrix in self._matrices[pair]]

    def _agreed(self, layer: int, logits: Floats, chosen: Sequence[set[int]]) -> int:
        select = self._ranker.rule(layer).select
        return sum(
            len(right.intersection(select(row).tolist()))
            for right, row in zip(chosen, logits, strict=True)
        )

    def best(self) -> Iterator[Gate]:
        """For each pair the candidate with most slots right; of equals, the one that is nearest to
        the layer's own router."""
        for pair, right in self._right.items():
            shares = np.array(right) / max(1, self._slots[pair])
            nearest = [0, *range(len(shares) - 1, 0, -1)]
            index = max(nearest, key=lambda at: shares[at])
            yield Gate(
                pair.target,
                pair.depth,
                self._matrices[pair][index] if index else None,
                stale=float(shares[0]),
                agreement=float(shares[index]),
                penalty=self._penalties[index - 1] if index else None,
            )
