"""What the two policies that predict by routers have in common: settings, and what they exclude."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from routeahead.policies.drop import DropCold
from routeahead.policies.forced import ForcedRouting
from routeahead.policies.settings import PolicySettings
from routeahead.prediction.predictions import Compute, Consumer, Late, Predictions, ReadEarly
from routeahead.routing.policy import Model, Precision
from routeahead.setting import ROUTE_AHEAD, setting

_PREDICTING = ("route_ahead", "predict_prefetch")


@dataclass(frozen=True)
class PredictionSettings(PolicySettings):
    """How predictions are computed."""

    route_ahead_compute: Compute = setting(
        "inline",
        "Predict in the graph's callback ('inline') or on a thread of its own ('worker').",
        ROUTE_AHEAD,
        needs=_PREDICTING,
    )
    router_precision: Precision = setting(
        "f32",
        "Router matrices that predict: 'f32' (the model's own), 'f16' or 'int8'.",
        ROUTE_AHEAD,
        needs=_PREDICTING,
    )


def make_predictions(
    model: Model,
    consumer: Consumer,
    options: PredictionSettings,
    *,
    late: Late,
    read_early: ReadEarly,
) -> Predictions:
    """Predictions for a policy, which take the model's other policies into account."""
    forced, drop = model.find(ForcedRouting), model.find(DropCold)
    if drop and options.route_ahead_compute == "worker":
        warnings.warn(
            "drop_cold_experts keeps what was read early, and with route_ahead_compute='worker' "
            "that depends on timing, and so does the output: 'inline' repeats",
            stacklevel=2,
        )
    return Predictions(
        model,
        consumer,
        compute=options.route_ahead_compute,
        late=late,
        precision=options.router_precision,
        read_early=read_early,
        recorded=forced.selection if forced else None,
        cold_share=drop.share if drop and drop.aware else 0.0,
    )
