"""Ranks experts as a layer's own router would, on any hidden vector."""

from __future__ import annotations

import warnings

from routeahead.llamacpp import ggml
from routeahead.llamacpp.router_input import RouterInput
from routeahead.llamacpp.router_product import RouterProduct
from routeahead.routing.policy import Precision
from routeahead.routing.selection import SelectionRule
from routeahead.types import Floats, Ids


class RouterRanker:
    """The routers that the graph has shown so far, outside of it: a `routing.policy.Ranker`.

    Attributes:
        input: where routers and hidden vectors are read.
    """

    def __init__(self, source: RouterInput, precision: Precision) -> None:
        self.input, self._precision = source, precision
        self._products: dict[int, RouterProduct] = {}
        self._seen = 0  # routers that `prepare` has looked at

    def __contains__(self, layer: object) -> bool:
        return layer in self._products

    def prepare(self) -> None:
        """Makes the products of the layers that have been seen. Nothing may be computing."""
        routers = self.input.routers
        if self._seen == len(routers):
            return
        self._seen, unknown = len(routers), 0
        for layer, router in routers.items():
            if router is None:
                unknown += 1
            elif layer not in self._products and router.rule:
                matrix = ggml.tensor_at(router.matrix)
                self._products[layer] = RouterProduct(matrix, self._precision)
        if unknown:
            warnings.warn(
                f"how {unknown} layers choose their experts is not understood: nothing is "
                "predicted for them",
                stacklevel=2,
            )

    def seen(self, layer: int) -> bool:
        return layer in self.input.routers

    def rule(self, layer: int) -> SelectionRule:
        router = self.input.routers[layer]
        assert router and router.rule  # it has a product
        return router.rule

    def logits(self, layer: int, hidden: Floats) -> Floats:
        """Logits (n_expert,) in memory that the next call for the layer reuses."""
        return self._products[layer].logits(hidden)

    def rank(self, layer: int, hidden: Floats) -> Ids:
        """Ids (top_k,), best first."""
        return self.rule(layer).select(self.logits(layer, hidden))
