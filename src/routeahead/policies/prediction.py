"""What the policies that predict by routers have in common."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from routeahead.policies.drop import DropCold
from routeahead.policies.forced import ForcedRouting
from routeahead.policies.settings import PolicySettings
from routeahead.prediction.consumer import Compute, Late, ReadEarly, Reason
from routeahead.prediction.predictions import Predictions
from routeahead.prediction.rankings import StepRankings
from routeahead.routing.policy import HALF, Model, Policy, Precision, Routing
from routeahead.setting import ROUTE_AHEAD, setting
from routeahead.telemetry.counters import Totals
from routeahead.types import Floats, Phase

_PREDICTING = ("route_ahead", "predict_prefetch")


@dataclass(frozen=True)
class PredictionSettings(PolicySettings):
    """How predictions are computed."""

    route_ahead_compute: Compute = setting(
        "inline",
        "Predict in the graph's callback ('inline'), on a thread of its own ('worker'), or, with "
        "route_ahead, by the graph's own router products ('graph').",
        ROUTE_AHEAD,
        needs=_PREDICTING,
    )
    router_precision: Precision = setting(
        "f32",
        "Router matrices that predict: 'f32' (the model's own), 'f16' or 'int8'.",
        ROUTE_AHEAD,
        needs=_PREDICTING,
    )


class PredictingPolicy(StepRankings, Policy):
    """Shows every hidden vector to `Predictions`, which offer it their rankings.

    Attributes:
        depth: how many MoE layers early it predicts; HALF: from what a layer's attention is given.
        predictions: where rankings come from; set when the policy is bound.
    """

    depth: float
    predictions: Predictions

    def predict_for(
        self,
        model: Model,
        options: PredictionSettings,
        *,
        late: Late,
        read_early: ReadEarly,
        skip: int = 0,
        weighing: bool = False,
        more: int | None = None,
    ) -> None:
        """Makes the predictions, which take the model's other policies into account."""
        forced, drop = model.find(ForcedRouting), model.find(DropCold)
        if drop and options.route_ahead_compute == "worker":
            warnings.warn(
                "drop_cold_experts keeps what was read early, and with "
                "route_ahead_compute='worker' that depends on timing, and so does the output: "
                "'inline' repeats",
                stacklevel=2,
            )
        self.predictions = Predictions(
            model,
            self,
            compute=options.route_ahead_compute,
            late=late,
            precision=options.router_precision,
            read_early=read_early,
            recorded=forced.selection if forced else None,
            cold_share=drop.share if drop and drop.aware else 0.0,
            skip=skip,
            weighing=weighing,
            more=more,
        )

    def commits(self, layer: int) -> bool:
        """Whether the layer is going to compute with what is predicted for it."""
        return False

    def cannot_predict(self, layer: int, reason: Reason) -> None:
        """There will be no ranking for the layer in this step."""

    def wants_hidden(self, phase: Phase) -> bool:
        return self.predictions.active

    def wants_attention_input(self, phase: Phase) -> bool:
        return self.depth == HALF and self.predictions.active

    def before_attention(self, layer: int, hidden: Floats) -> None:
        self.predictions.approach(layer, hidden)

    def begin(self, phase: Phase, position: int) -> None:
        self.predictions.begin(phase, position)

    def predict(self, routing: Routing) -> None:
        self.predictions.predict(routing)

    def issued(self, routing: Routing) -> None:
        self.predictions.issue(routing.layer)

    def product(self, layer: int) -> None:
        self.predictions.issue(layer)

    def count(self, totals: Totals) -> None:
        for name, seconds in vars(self.predictions.times).items():
            setattr(totals, name, getattr(totals, name) + seconds)

    def recover(self) -> None:
        self.predictions.recover()

    def close(self) -> None:
        self.predictions.close()
