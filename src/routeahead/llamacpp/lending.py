"""Lending a layer's router product to a later layer.

During decode, the router of a layer whose experts are known already (they were predicted) would
compute a ranking that nobody uses. The node filter points that product, and the additions of its
biases, at the tensors of a later layer's router when llama.cpp asks about them, which is before
they run, and points them back at the next stop. So the layer's top-k is the later layer's ranking
of this layer's hidden vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routeahead.errors import StreamError
from routeahead.llamacpp import ggml
from routeahead.llamacpp.node_filter import LENT, LENT_AT, LENT_FROM, LENT_TO, OPERANDS
from routeahead.llamacpp.router_graph import Router

_NOBODY = np.zeros(2 * OPERANDS, np.int64)


@dataclass(frozen=True)
class Loan:
    """One layer's router, lent to another.

    Attributes:
        target: number of the layer whose experts it will rank.
        words: what LENT_FROM and LENT_TO have then.
    """

    target: int
    words: npt.NDArray[np.int64]

    @property
    def operands(self) -> int:
        """How many will be exchanged."""
        return int(np.count_nonzero(self.words[:OPERANDS]))


def make_loan(lender: Router, target: int, borrower: Router) -> Loan | None:
    """The loan of `lender` to layer `target`, whose router is `borrower`; None if their parts of
    the graph are not alike, or lie on different devices."""
    there = [ggml.tensor_at(router.matrix).buffer for router in (lender, borrower)]
    if not lender.computes_as(borrower) or there[0] != there[1]:
        return None
    pairs = (
        (router.matrix, router.router_bias, router.selection_bias) for router in (lender, borrower)
    )
    return Loan(target, np.array([*pairs], np.int64).ravel())


class Lending:
    """The filter's state words that a loan needs."""

    def __init__(self, state: npt.NDArray[np.int64]) -> None:
        self._state = state
        self._loan: Loan | None = None

    def lend(self, loan: Loan) -> None:
        """At a stop: the next layer's router will be lent."""
        self._loan, self._state[LENT] = loan, 0
        self._state[LENT_FROM : LENT_TO + OPERANDS] = loan.words

    def at_topk(self) -> int | None:
        """The layer whose experts the top-k has ranked, if it is not the top-k's own.

        Raises:
            StreamError: only a part of the router was lent, so the top-k is nobody's.
        """
        loan, self._loan = self._loan, None
        if loan is None:
            return None
        self._state[LENT_FROM : LENT_TO + OPERANDS] = _NOBODY
        exchanged = int(self._state[LENT])
        if exchanged not in (0, loan.operands):
            raise StreamError(
                f"{exchanged} of {loan.operands} parts of a router were exchanged: use "
                "route_ahead_compute=inline with this model"
            )
        return loan.target if exchanged else None

    def end(self) -> None:
        """The batch is over. What the filter does at each stop, for what is behind the last one."""
        for operand in range(OPERANDS):
            address = int(self._state[LENT_AT + operand])
            if address:
                node, index = ggml.tensor_at(address), int(operand > 0)
                if node.src[index] == self._state[LENT_TO + operand]:
                    node.src[index] = int(self._state[LENT_FROM + operand])
        self._state[LENT : LENT_AT + OPERANDS] = 0
        self._loan = None
