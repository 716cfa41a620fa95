"""Scores of predictors: how well would each of them have known the routing?

Scored against what the router chose, in decode:

* the router of a layer on the hidden vector of 1 to 4 MoE layers earlier (*stale gate*, as papers
  call it);
* the same on the layer's own hidden vector (*control*): it must be right always, or vectors,
  routers or the selection rule are not what the other figures take them for;
* the routing of the token before, at the same layer;
* the experts that the run has used most often so far, at the same layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from routeahead.types import Ids

CONTROL = "control"
PREVIOUS, HOTTEST = "previous token", "hottest"
DEPTHS = (1, 2, 3, 4)


def stale_gate(depth: int) -> str:
    """Name of the predictor that looks `depth` MoE layers ahead; 0 is the control."""
    return f"stale gate {depth}" if depth else CONTROL


PREDICTORS = (CONTROL, *map(stale_gate, DEPTHS), PREVIOUS, HOTTEST)


@dataclass
class Score:
    """How often one predictor was right.

    Attributes:
        routings, whole: scored, and those whose experts were all predicted.
        slots, found: of them, and those whose expert was predicted.
    """

    routings: int = 0
    whole: int = 0
    slots: int = 0
    found: int = 0

    def add(self, router: set[int], predicted: set[int]) -> None:
        self.routings += 1
        self.whole += router == predicted
        self.slots += len(router)
        self.found += len(router & predicted)

    def plus(self, other: Score) -> Score:
        return Score(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def overlap(self) -> float | None:
        """Share of slots; None if there was nothing to score."""
        return self.found / self.slots if self.slots else None

    @property
    def accuracy(self) -> float | None:
        """Share of whole routings; None if there was nothing to score."""
        return self.whole / self.routings if self.routings else None


class PredictorScores:
    """Collects predictions and scores them when the router has spoken.

    Attributes:
        scores: predictor → layer → score.
    """

    def __init__(self, layers: Sequence[int], n_expert: int) -> None:
        self.scores = {name: {layer: Score() for layer in layers} for name in PREDICTORS}
        self._predicted: dict[int, dict[str, set[int]]] = {layer: {} for layer in layers}
        self._used = {layer: np.zeros(n_expert, np.int64) for layer in layers}
        self._last: dict[int, set[int]] = {}

    def begin(self) -> None:
        """A new step: predictions of the last one that were not scored are of no use."""
        for predicted in self._predicted.values():
            predicted.clear()

    def predict(self, predictor: str, layer: int, ids: Ids) -> None:
        self._predicted[layer][predictor] = set(ids.tolist())

    def routed(self, layer: int, ids: Ids, *, score: bool) -> None:
        """The router chose `ids` (rows, top-k); one row is scored if `score` says so."""
        used = self._used[layer]
        if score and len(ids) == 1:
            router, predicted = set(ids[0].tolist()), self._predicted[layer]
            if layer in self._last:
                predicted[PREVIOUS] = self._last[layer]
            if used.any():
                hottest = np.argsort(-used, kind="stable")[: len(router)]
                predicted[HOTTEST] = set(hottest.tolist())
            for name, guess in predicted.items():
                self.scores[name][layer].add(router, guess)
        np.add.at(used, ids.ravel(), 1)
        if len(ids):
            self._last[layer] = set(ids[-1].tolist())

    def total(self, predictor: str) -> Score:
        """Over all layers."""
        total = Score()
        for score in self.scores[predictor].values():
            total = total.plus(score)
        return total

    @property
    def sound(self) -> bool:
        """The control was right wherever it was scored."""
        control = self.total(CONTROL)
        return control.whole == control.routings
