"""Shows each layer's hidden vectors and selections to whoever calibrates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from routeahead.errors import ModelError
from routeahead.routing.policy import HALF, Model, Policy, Ranker, Routing
from routeahead.types import Floats, Ids, Phase

Seen = Callable[[float, Floats, Ids], None]
"""Takes a layer, hidden vectors (rows, width), and what the router chose (rows, top_k). What the
layer's attention is given comes as half a layer before it, where nothing is chosen: (rows, 0)."""


class Observer(Policy):
    """Changes nothing. Hidden vectors are valid while `seen` runs.

    Attributes:
        ranker: the routers, from the second batch on.
        seen: who is shown what; None in the first batch, which only shows the routers.
    """

    ranker: Ranker

    def __init__(self, *, attention: bool = False) -> None:
        """`attention`: what each layer's attention is given is shown, too."""
        self.seen: Seen | None = None
        self._attention = attention

    def bind(self, model: Model) -> None:
        self.ranker = model.ranker("f32")

    def wants_hidden(self, phase: Phase) -> bool:
        return True

    def wants_attention_input(self, phase: Phase) -> bool:
        return self._attention

    def before_attention(self, layer: int, hidden: Floats) -> None:
        if self.seen is not None:
            self.seen(layer - HALF, hidden, np.empty((len(hidden), 0), np.int32))

    def begin(self, phase: Phase, position: int) -> None:
        self.ranker.prepare()

    def routed(self, routing: Routing) -> None:
        if self.seen is None:
            return
        if routing.hidden is None:
            raise ModelError(
                f"layer {routing.layer}: what its router is given cannot be read, so this "
                "architecture cannot be calibrated"
            )
        self.seen(routing.layer, routing.hidden, routing.ids)
