"""Routings to show a policy without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from routeahead.routing.policy import Model, Ranker, Routing
from routeahead.types import Floats, Ids


class Reads:
    """A cache that holds some experts of every layer, and lanes that only note what is asked.

    Attributes:
        asked: (kind, layer, experts) of each early read.
    """

    def __init__(self, held: Collection[int] = ()) -> None:
        self.held = held
        self.asked: list[tuple[str, int, list[int]]] = []

    def resident(self, layer: int, expert: int) -> bool:
        return expert in self.held

    def cached(self, layer: int, expert: int) -> bool:
        return expert in self.held

    def read_early(self, layer: int, experts: Sequence[int]) -> None:
        self.asked.append(("early", layer, list(experts)))

    def guess(self, layer: int, experts: Sequence[int], limit: int | None = None) -> None:
        self.asked.append(("guess", layer, list(experts)[:limit]))

    def protect(self, layer: int, experts: Sequence[int]) -> None:
        self.asked.append(("protect", layer, list(experts)))


def no_scores() -> Floats:
    raise AssertionError("this policy has no use for the router's scores")


def no_ranker(precision: str) -> Ranker:
    raise AssertionError("this policy has no use for routers")


def model(
    layers: Sequence[int],
    *,
    n_expert: int = 32,
    top_k: int = 2,
    reads: Reads | None = None,
    ranker: Callable[..., Ranker] = no_ranker,
) -> Model:
    return Model(layers, n_expert, top_k, 64, reads or Reads(), ranker)


def routing(
    layer: int,
    ids: Ids,
    *,
    phase: str = "decode",
    n_expert: int = 32,
    reads: Reads | None = None,
    scores: Callable[[], Floats] = no_scores,
    hidden: Floats | None = None,
) -> Routing:
    return Routing(
        phase,  # type: ignore[arg-type]
        layer,
        np.arange(len(ids)),
        ids,
        n_expert=n_expert,
        experts=reads or Reads(),
        scores=scores,
        hidden=hidden,
    )


def weighed(ids: Ids, weights: Floats, *, resident: Collection[int] = ()) -> Routing:
    """A routing whose final weights are known."""
    made = routing(0, ids, reads=Reads(resident))
    made.weigh(weights)
    return made
