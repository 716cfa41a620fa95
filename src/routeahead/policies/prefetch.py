"""Two prefetchers. They guess what a layer will route to and never change what it does.

Their guesses are read while no layer waits for bytes, and cancelled when one does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from routeahead.errors import SettingsError
from routeahead.policies.drop import DropCold
from routeahead.policies.prediction import PredictingPolicy, PredictionSettings
from routeahead.policies.settings import PolicySettings
from routeahead.policies.substitute import Substitute
from routeahead.routing.policy import Model, Policy, Routing
from routeahead.setting import POLICIES, setting
from routeahead.telemetry.counters import Totals, share

_UNKNOWN = "this model's routers know nothing of a forced routing"


@dataclass(frozen=True)
class TemporalSettings(PolicySettings):
    """Settings of `TemporalPrefetch`."""

    prefetch: int = setting(
        0,
        "Read ahead what the previous token routed to in the next K MoE layers; 0 is off.",
        POLICIES,
        low=0,
        metavar="K",
        excludes={"predict_prefetch": "one guess a layer can be read, not two"},
    )

    def make(self, model: Model) -> Policy | None:
        return TemporalPrefetch(self.prefetch) if self.prefetch else None


class TemporalPrefetch(Policy):
    """Guesses that a token routes as the token before it did.

    Attributes:
        depth: K, how many MoE layers to guess ahead.
    """

    reads_early = "temporal"

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._last: dict[int, list[int]] = {}

    def bind(self, model: Model) -> None:
        self._model = model
        _warn_of_lookers(model)

    def issued(self, routing: Routing) -> None:
        """Guesses while the layer computes, nearest first; the last row is the latest token's."""
        if routing.phase == "decode":
            for target in self._model.after(routing.layer, self.depth):
                if target in self._last:
                    self._model.experts.guess(target, self._last[target])
        if len(routing.ids):
            self._last[routing.layer] = routing.ids[-1].tolist()


@dataclass(frozen=True)
class PredictedSettings(PredictionSettings):
    """Settings of `PredictedPrefetch`."""

    predict_prefetch: bool = setting(
        False,
        "Read ahead what the next layer's router says of this layer's input.",
        POLICIES,
        excludes={
            "predict_log": "both want the routers' inputs: probe first, then prefetch",
            "replay_routing": _UNKNOWN,
        },
    )
    predict_spec_max: int = setting(
        2,
        "With predict_prefetch: missing experts to read a layer at most; 0 only keeps what is "
        "there.",
        POLICIES,
        low=0,
        metavar="M",
        needs=("predict_prefetch",),
    )

    def check(self) -> None:
        if self.predict_prefetch and not self.predict_spec_max and not self.cache_mb:
            raise SettingsError(
                "predict_spec_max=0 only protects what the cache has, and cache_mb=0 keeps nothing"
            )

    def make(self, model: Model) -> Policy | None:
        return PredictedPrefetch(self.predict_spec_max, self) if self.predict_prefetch else None


class PredictedPrefetch(PredictingPolicy):
    """Guesses what the next layer's own router says of this layer's input.

    Attributes:
        depth: 1, in MoE layers.
        slots, agreed_slots: of guessed routings; agreed are those of experts that were guessed.
    """

    name = "predict_prefetch"
    reads_early = "predicted"
    depth = 1

    def __init__(self, limit: int, options: PredictionSettings) -> None:
        """Reads at most `limit` missing experts a layer ahead; 0 only keeps what is there."""
        super().__init__()
        self.slots = self.agreed_slots = 0
        self._limit, self._options = limit, options

    def bind(self, model: Model) -> None:
        self._experts = model.experts
        # A guess that is late is worth nothing, so it is not waited for.
        self.predict_for(model, self._options, late="pass", read_early=self._read)
        _warn_of_lookers(model)

    def routed(self, routing: Routing) -> None:
        self.predictions.settle(routing)
        guess = self.take(routing.layer)
        if guess is not None and len(routing.ids) == len(guess.ids):
            self.slots += guess.ids.size
            for named, router in zip(guess.ids.tolist(), routing.ids.tolist(), strict=True):
                self.agreed_slots += len(set(named).intersection(router))

    def report(self, decode: Totals) -> dict[str, Any]:
        return {
            "slots": self.slots,
            "agreed_slots": self.agreed_slots,
            **self.predictions.facts(decode),
        }

    def lines(self, decode: Totals) -> list[str]:
        named = share(self.agreed_slots, self.slots)
        return [
            f"moe-predict: the next layer's router, asked a layer early, named {named} of its "
            "slots",
            *self.predictions.lines("moe-predict", decode),
        ]

    def _read(self, layer: int, experts: Sequence[int]) -> None:
        self._experts.protect(layer, experts)
        self._experts.guess(layer, experts, self._limit)


def _warn_of_lookers(model: Model) -> None:
    if model.find(DropCold) or model.find(Substitute):
        warnings.warn(
            "drop_cold_experts and expert_substitute look at what is in memory, and a prefetcher "
            "changes that: the output depends on how fast its reads are",
            stacklevel=2,
        )
