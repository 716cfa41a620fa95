"""Ranks experts as a layer's own router would, on any hidden vector."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace

from routeahead.llamacpp import ggml
from routeahead.llamacpp.lending import Loan, make_loan
from routeahead.llamacpp.router_graph import Router
from routeahead.llamacpp.router_input import RouterInput
from routeahead.llamacpp.router_matrix import RouterMatrix
from routeahead.llamacpp.router_product import RouterProduct, as_float32
from routeahead.prediction.gates import Gate
from routeahead.routing.policy import Precision, Ranking
from routeahead.routing.selection import SelectionRule
from routeahead.types import Floats, Ids


class RouterRanker:
    """The routers that the graph has shown so far, outside of it: a `routing.policy.Ranker`.

    A layer's *own* router is always the model's; what predicts for it may be a calibrated one, and
    stored at another precision.

    Attributes:
        input: where routers and hidden vectors are read.
        convert_s: seconds that storing the matrices has taken.
    """

    def __init__(
        self, source: RouterInput, precision: Precision, gates: Mapping[int, Gate] | None = None
    ) -> None:
        """`gates`: by layer, what predicts it in the place of its own router."""
        self.input, self._precision = source, precision
        self._gates = gates or {}
        self._fitted: dict[int, RouterMatrix] = {}
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
                self._own[layer] = RouterProduct(ggml.tensor_at(router.matrix), "f32", router.rule)
                self._predicting[layer] = self._predictor(layer, router)
        self.convert_s += time.perf_counter() - start
        if unknown:
            warnings.warn(
                f"how {unknown} layers choose their experts is not understood: nothing is "
                "predicted for them",
                stacklevel=2,
            )

    def _predictor(self, layer: int, router: Router) -> RouterProduct:
        gate = self._gates.get(layer)
        if gate is not None and gate.matrix is not None:
            self._fitted[layer] = RouterMatrix(gate.matrix, router.matrix)
        elif self._precision == "f32":
            return self._own[layer]
        matrix = ggml.tensor_at(self._matrix(layer, router))
        return RouterProduct(matrix, self._precision, router.rule)

    def _matrix(self, layer: int, router: Router) -> int:
        """Address of the matrix that predicts for the layer."""
        fitted = self._fitted.get(layer)
        return fitted.address if fitted else router.matrix

    def matrix(self, layer: int) -> Floats:
        """The layer's own matrix (n_expert, width), as a copy."""
        router = self.input.routers[layer]
        assert router
        return as_float32(ggml.tensor_at(router.matrix))

    def expected(self, layer: int) -> float | None:
        gate = self._gates.get(layer)
        return gate.agreement if gate else None

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

    def predict(self, layer: int, hidden: Floats, more: int = 0) -> Ranking:
        """A ranking whose probabilities lie in memory that the next call for the layer reuses."""
        product = self._predicting[layer]
        return Ranking(product.rank(hidden, more), product.probabilities)

    def best(self, layer: int, hidden: Floats, more: int = 0) -> Ids:
        return self._predicting[layer].best(hidden, more)

    def _loan(self, layer: int, target: int) -> Loan | None:
        lender, borrower = self.input.routers.get(layer), self.input.routers.get(target)
        fitted = self._fitted.get(target)
        if not (lender and borrower) or (fitted and not fitted.in_graph):
            return None
        matrix = self._matrix(target, borrower)
        return make_loan(lender, target, replace(borrower, matrix=matrix))

    def lend(self, layer: int, target: int, *, hidden: bool) -> bool:
        key = layer, target
        if key not in self._loans:
            self._loans[key] = self._loan(layer, target)
        loan = self._loans[key]
        if loan is None:
            return False
        self.input.lending.lend(loan)
        if not hidden:
            self.input.skip()
        return True
