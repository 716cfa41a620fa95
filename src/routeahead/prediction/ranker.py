"""Ranks experts as a layer's own router would, on any hidden vector."""

from __future__ import annotations

import time
import warnings

from routeahead.llamacpp import ggml
from routeahead.llamacpp.lending import Loan, make_loan
from routeahead.llamacpp.router_input import RouterInput
from routeahead.llamacpp.router_product import RouterProduct
from routeahead.routing.policy import Precision, Ranking
from routeahead.routing.selection import SelectionRule
from routeahead.types import Floats, Ids


class RouterRanker:
    """The routers that the graph has shown so far, outside of it: a `routing.policy.Ranker`.

    A layer's *own* router is always the model's; what predicts for it may be stored at another
    precision.

    Attributes:
        input: where routers and hidden vectors are read.
        convert_s: seconds that storing the matrices has taken.
    """

    def __init__(self, source: RouterInput, precision: Precision) -> None:
        self.input, self._precision = source, precision
        self.convert_s = 0.0
        self._own: dict[int, RouterProduct] = {}
        self._predicting: dict[int, RouterProduct] = {}
        self._loans: dict[tuple[int, int], Loan | None] = {}
        self._seen = 0  # routers that `prepare` has looked at

    def __contains__(self, layer: object) -> bool:
        return layer in self._own

    def prepare(self) -> None:
        """Makes the products of the layers that have been seen. Nothing may be computing."""
        routers = self.input.routers
        if self._seen == len(routers):
            return
        self._seen, unknown = len(routers), 0
        start = time.perf_counter()
        for layer, router in routers.items():
            if router is None:
                unknown += 1
            elif layer not in self._own and router.rule:
                matrix = ggml.tensor_at(router.matrix)
                own = self._own[layer] = RouterProduct(matrix, "f32", router.rule)
                self._predicting[layer] = (
                    own
                    if self._precision == "f32"
                    else RouterProduct(matrix, self._precision, router.rule)
                )
        self.convert_s += time.perf_counter() - start
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
        return self._own[layer].logits(hidden)

    def rank(self, layer: int, hidden: Floats) -> Ids:
        """Ids (top_k,), best first."""
        return self._own[layer].rank(hidden)

    def own(self, layer: int, hidden: Floats) -> Floats | None:
        self._own[layer].rank(hidden)
        return self._own[layer].probabilities

    def predict(self, layer: int, hidden: Floats) -> Ranking:
        """A ranking whose probabilities lie in memory that the next call for the layer reuses."""
        product = self._predicting[layer]
        return Ranking(product.rank(hidden), product.probabilities)

    def lend(self, layer: int, target: int, *, hidden: bool) -> bool:
        key = layer, target
        if key not in self._loans:
            lender, borrower = (self.input.routers.get(one) for one in key)
            self._loans[key] = make_loan(lender, target, borrower) if lender and borrower else None
        loan = self._loans[key]
        if loan is None:
            return False
        self.input.lending.lend(loan)
        if not hidden:
            self.input.skip()
        return True
