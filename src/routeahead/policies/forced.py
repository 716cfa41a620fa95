"""Forced routing: a recorded trace decides which experts are used.

Random weights with a real model's routing have its shapes, bytes and locality, which is what a
benchmark needs; the text means nothing. The weights of the forced experts stay the router's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from routeahead.errors import SettingsError
from routeahead.policies.settings import PolicySettings
from routeahead.routing.policy import Model, Policy, Routing
from routeahead.setting import EXPERIMENTS, setting
from routeahead.telemetry.route_trace import RouteTrace, read_trace
from routeahead.types import Ids


@dataclass(frozen=True)
class ForcedSettings(PolicySettings):
    """Settings of `ForcedRouting`."""

    replay_routing: Path | None = setting(
        None, "Route as this recorded trace did (random weights, real locality).", EXPERIMENTS
    )

    def make(self, model: Model) -> Policy | None:
        if not self.replay_routing:
            return None
        trace = read_trace(self.replay_routing)
        top_ks = {layer: model.top_k_by_layer.get(layer, model.top_k) for layer in model.layers}
        return ForcedRouting(trace, top_ks, n_expert=model.n_expert)


class ForcedRouting(Policy):
    """Replaces every selection by the recorded one of the same position and layer."""

    name = "forced"

    def __init__(self, trace: RouteTrace, top_ks: Mapping[int, int], *, n_expert: int) -> None:
        """
        Takes the routings of the layers in `top_ks`, each with its top-k, from a trace.

        Raises:
            SettingsError: the trace does not fit the model.
        """
        self._ids: dict[tuple[int, int], Ids] = {}
        for (step, layer), ids in trace.selections().items():
            if layer not in top_ks:
                continue  # a trace of the whole model drives its first layers
            if len(ids) != top_ks[layer] or ids.max() >= n_expert:
                raise SettingsError(
                    f"the trace routes to {len(ids)} experts up to {ids.max()}, and this model "
                    f"takes {top_ks[layer]} of {n_expert}: set n_expert_used, or use another trace"
                )
            self._ids[step, layer] = ids
        absent = sorted(set(top_ks) - {layer for _, layer in self._ids})
        if absent:
            raise SettingsError(f"the trace has no routing for layer {absent[0]} of this model")

    def routed(self, routing: Routing) -> None:
        positions = routing.positions.tolist()
        if positions:  # a ubatch without output has no row in the last layer
            routing.choose(np.stack([self.selection(p, routing.layer) for p in positions]))

    def selection(self, position: int, layer: int) -> Ids:
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
