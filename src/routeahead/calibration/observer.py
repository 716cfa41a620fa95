"""Shows each layer's hidden vectors and selections to whoever calibrates."""

from __future__ import annotations

from collections.abc import Callable

from routeahead.errors import ModelError
from routeahead.routing.policy import Model, Policy, Ranker, Routing
from routeahead.types import Floats, Ids, Phase

Seen = Callable[[int, Floats, Ids], None]
"""Takes a layer, hidden vectors (rows, width), and what the router chose (rows, top_k)."""


class Observer(Policy):
    """Changes nothing. Hidden vectors are valid while `seen` runs.

    Attributes:
        ranker: the routers, from the second batch on.
        seen: who is shown what; None in the first batch, which only shows the routers.
    """

    ranker: Ranker

    def __init__(self) -> None:
        self.seen: Seen | None = None

    def bind(self, model: Model) -> None:
        self.ranker = model.ranker("f32")

    def wants_hidden(self, phase: Phase) -> bool:
        return True

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
