"""Which matrix predicts a layer best, on documents that none of them was fitted on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from routeahead.calibration.moments import Pair
from routeahead.prediction.gates import Gate
from routeahead.routing.policy import Ranker
from routeahead.routing.selection import SelectionRule
from routeahead.types import Floats, Ids


class Scoring:
    """Counts for each pair and candidate matrix the slots that it predicts right."""

    def __init__(self, ranker: Ranker, penalties: Sequence[float]) -> None:
        self._ranker, self._penalties = ranker, penalties
        self._into: dict[float, list[Pair]] = {}
        self._from: dict[float, list[Pair]] = {}
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

    def seen(self, layer: float, hidden: Floats, ids: Ids) -> None:
        """As `Observer.seen`."""
        for pair in self._into.get(layer, ()):
            self._slots[pair] += ids.size
            rule = self._ranker.rule(pair.target)
            for index, logits in enumerate(self._logits.pop(pair)):
                self._right[pair][index] += agreed(rule, logits, ids)
        for pair in self._from.get(layer, ()):
            self._logits[pair] = [hidden @ matrix.T for matrix in self._matrices[pair]]

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


def agreed(rule: SelectionRule, logits: Floats, ids: Ids) -> int:
    """How many of `ids` (rows, top_k) the rule selects from `logits` (rows, n_expert)."""
    if rule.groups or rule.selection_bias is not None:
        selected = np.stack([rule.select(row).astype(np.int64) for row in logits])
    else:  # an activation leaves the order as it is
        scores = logits if rule.router_bias is None else logits + rule.router_bias
        selected = np.argpartition(-scores, rule.top_k - 1, axis=1)[:, : rule.top_k]
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, ids.astype(np.int64), True, axis=1)
    return int(np.take_along_axis(chosen, selected, axis=1).sum())
