"""Ranks experts as a layer's own router would, on any hidden row."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from routeahead.llamacpp import ggml
from routeahead.llamacpp.router_input import GateTap, Row
from routeahead.llamacpp.router_product import Gate, Precision
from routeahead.routing.selection import SelectionRule

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Ranker:
    """The routers that the graph has shown so far, outside of it.

    Attributes:
        tap: where rows and routers are read.
    """

    def __init__(self, layers: Sequence[int], tap: GateTap, precision: Precision) -> None:
        """`layers`: numbers of the MoE layers, in order; elsewhere a layer is its index there."""
        self.tap = tap
        self._layers, self._precision = layers, precision
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._gates: dict[int, Gate] = {}
        self._unknown = 0  # layers whose selection rule was not understood

    def __contains__(self, index: int) -> bool:
        return index in self._gates

    def prepare(self) -> None:
        """Makes the gates of the layers that have been seen by now. Nothing is being computed."""
        if len(self._gates) + self._unknown == len(self.tap.routers):
            return
        self._unknown = 0
        for layer, router in self.tap.routers.items():
            index = self._index[layer]
            if router is None:
                self._unknown += 1
            elif index not in self._gates:
                self._gates[index] = Gate(ggml.tensor_at(router.gate), self._precision)
        if self._unknown:
            warnings.warn(
                f"how {self._unknown} layers choose their experts is not understood: nothing is "
                "predicted for them",
                stacklevel=2,
            )

    def rule(self, index: int) -> SelectionRule:
        router = self.tap.routers[self._layers[index]]
        assert router  # it has a gate
        return router.rule

    def logits(self, index: int, row: Row) -> Floats:
        """Logits (n_expert,) in memory that the next call for the layer reuses."""
        return self._gates[index].logits(row)

    def rank(self, index: int, row: Row) -> Ids:
        """Ids (top_k,), best first."""
        return self.rule(index).select(self.logits(index, row))
