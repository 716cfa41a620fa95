"""The probe's part in the engine: lets gates predict, at the top-k of each decoded layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from routeahead.llamacpp.router_input import Row
from routeahead.policies.probe import DEPTHS, Probe, stale_gate
from routeahead.prediction.ranker import Ranker
from routeahead.telemetry.counters import Phase


class GateProbe:
    """Belongs to the evaluation thread, and computes there: a probed run is slow.

    Attributes:
        probe: the scores.
    """

    def __init__(self, layers: Sequence[int], n_expert: int, ranker: Ranker) -> None:
        self.probe = Probe(layers, n_expert)
        self._layers, self._ranker = layers, ranker
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._decoding = False

    def begin(self, phase: Phase) -> None:
        self._decoding = phase == "decode"
        self.probe.begin()
        self._ranker.tap.begin(reading=self._decoding)
        if self._decoding:
            self._ranker.prepare()

    def routed(self, layer: int, ids: npt.NDArray[np.int32], row: Row | None) -> None:
        """At the top-k of `layer`; `ids` are still the router's own."""
        if self._decoding and row is not None:
            index = self._index[layer]
            for depth in (0, *DEPTHS):
                target = index + depth
                if target < len(self._layers) and target in self._ranker:
                    ranked = self._ranker.rank(target, row)
                    self.probe.predict(stale_gate(depth), self._layers[target], ranked)
        self.probe.routed(layer, ids, score=self._decoding)
