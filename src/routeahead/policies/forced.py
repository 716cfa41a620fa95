"""Forced routing: a recorded trace decides which experts are used.

Random weights with a real model's routing have its shapes, bytes and locality, which is what a
benchmark needs; the text means nothing. The weights of the forced experts stay the graph's own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routeahead.errors import SettingsError
from routeahead.routing.policy import Routing
from routeahead.telemetry.route_trace import RouteTrace


class ForcedRouting:
    """Replaces every selection by the recorded one of the same position and layer.

    Raises:
        SettingsError: the trace does not fit the model, or the run leaves what was recorded.
    """

    def __init__(self, trace: RouteTrace, *, layers: list[int], n_expert: int, top_k: int) -> None:
        self._ids: dict[tuple[int, int], npt.NDArray[np.int32]] = {}
        for (step, layer), ids in trace.selections().items():
            if layer not in layers:
                continue  # a trace of the whole model drives its first layers
            if len(ids) != top_k or ids.max() >= n_expert:
                raise SettingsError(
                    f"the trace routes to {len(ids)} experts up to {ids.max()} where this model "
                    f"takes {top_k} of {n_expert}: set n_expert_used, or use another trace"
                )
            self._ids[step, layer] = ids
        absent = sorted(set(layers) - {layer for _, layer in self._ids})
        if absent:
            raise SettingsError(f"the trace has no routing for layer {absent[0]} of this model")

    def commit(self, routing: Routing) -> bool:
        for row, position in enumerate(routing.positions.tolist()):
            routing.ids[row] = self.selection(position, routing.layer)
        return True

    def selection(self, position: int, layer: int) -> npt.NDArray[np.int32]:
        """The recorded ids (top_k,) of one token in one layer.

        Raises:
            SettingsError: nothing was recorded there.
        """
        ids = self._ids.get((position, layer))
        if ids is None:
            raise SettingsError(
                f"the trace ends before position {position}: use fewer tokens or a longer trace"
            )
        return ids
