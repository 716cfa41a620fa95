"""What a routing policy sees and may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from routeahead.telemetry.counters import Phase


@dataclass(slots=True)
class Routing:
    """One layer's routing of one ubatch, at the moment its top-k is known.

    Attributes:
        phase: what the engine declared this batch to be.
        layer: the layer's number in the model.
        positions: int64 (rows,), each row's position in the sequence.
        ids: int32 (rows, top-k), in the graph's own memory. What a policy writes here is what the
            layer computes with; an id that is no expert ends the process, so write none.
        scores: gives float32 (rows, n_expert), what the graph has just ranked the experts by,
            biases included, -inf for those out of the race. Not to be written to, nor kept.
        resident: (layer, expert) → whether using it causes no read.
    """

    phase: Phase
    layer: int
    positions: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    scores: Callable[[], npt.NDArray[np.float32]]
    resident: Callable[[int, int], bool]


class RoutingPolicy(Protocol):
    def commit(self, routing: Routing) -> bool:
        """Changes `routing.ids` in place, before anything uses them; returns whether it did."""
        ...
