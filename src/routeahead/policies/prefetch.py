"""Two prefetchers. They guess what a layer will route to and never change what it does.

Their guesses are read while no layer waits for bytes, and cancelled when one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from routeahead.policies.route_ahead import Reason
from routeahead.prediction.rankings import StepRankings
from routeahead.routing.policy import Routing

Ids = npt.NDArray[np.int32]


class TemporalPrefetch:
    """Guesses that a token routes as the token before it did.

    Attributes:
        depth: K, how many MoE layers to guess ahead.
    """

    def __init__(self, layers: Sequence[int], depth: int) -> None:
        self.depth = depth
        self._layers = layers
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._last: dict[int, list[int]] = {}

    def routed(self, layer: int, ids: Ids) -> None:
        """The routing (rows, top-k) of `layer`; the last row is the latest token's."""
        if len(ids):
            self._last[layer] = ids[-1].tolist()

    def guesses(self, layer: int) -> Iterator[tuple[int, list[int]]]:
        """(layer, experts) while `layer` computes, nearest first."""
        after = self._index[layer] + 1
        for target in self._layers[after : after + self.depth]:
            if target in self._last:
                yield target, self._last[target]


class PredictedPrefetch(StepRankings):
    """Guesses what the next layer's own gate says of this layer's input.

    A `RoutingPolicy` that changes nothing: it is shown each routing to score its guess.

    Attributes:
        depth: 1, in MoE layers.
        slots, agreed_slots: of guessed routings; agreed are those of experts that were guessed.
    """

    depth = 1

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self.slots = self.agreed_slots = 0
        self._index = {layer: index for index, layer in enumerate(layers)}

    def cannot_predict(self, index: int, reason: Reason) -> None:
        """There will be no guess for the layer at `index`: then nothing is read for it."""

    def commit(self, routing: Routing) -> bool:
        guess = self._rankings.pop(self._index[routing.layer], None)
        if guess is not None and len(routing.ids) == 1:
            self.slots += len(guess)
            self.agreed_slots += len(set(guess.tolist()).intersection(routing.ids[0].tolist()))
        return False
