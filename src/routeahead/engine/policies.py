"""What a model does about routings beyond reading what they ask for, made from its settings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from routeahead.config import Settings
from routeahead.experts.layout import ModelLayout
from routeahead.experts.source import ExpertSource
from routeahead.llamacpp.eval_callback import GraphHook
from routeahead.llamacpp.router_product import check_width
from routeahead.policies.drop import DropCold
from routeahead.policies.forced import ForcedRouting
from routeahead.policies.prefetch import PredictedPrefetch, TemporalPrefetch
from routeahead.policies.route_ahead import RouteAhead
from routeahead.policies.substitute import Substitute
from routeahead.prediction.predictions import Ahead
from routeahead.prediction.probe import GateProbe
from routeahead.prediction.ranker import Ranker
from routeahead.prediction.watchdog import Watchdog
from routeahead.routing.policy import RoutingPolicy
from routeahead.telemetry.route_trace import read_trace


@dataclass
class Steering:
    """All of it may be absent.

    Attributes:
        policies: may change each routing, in this order.
        drop: may then take experts out of it, when their weights are known.
        ahead: makes predictions for `route_ahead` or `predicted`, which are among the policies.
        temporal: guesses routings from the token before.
        probe: scores predictors.
    """

    policies: Sequence[RoutingPolicy] = ()
    drop: DropCold | None = None
    ahead: Ahead | None = None
    route_ahead: RouteAhead | None = None
    predicted: PredictedPrefetch | None = None
    substitute: Substitute | None = None
    temporal: TemporalPrefetch | None = None
    probe: GateProbe | None = None

    def close(self) -> None:
        if self.ahead:
            self.ahead.close()


def steer(
    settings: Settings, layout: ModelLayout, top_k: int, hook: GraphHook, source: ExpertSource
) -> Steering:
    """
    Raises:
        SettingsError: a setting does not fit the model.
    """
    steering, layers = Steering(), layout.moe_layers
    check_width(settings.gate_precision, int(layout.value("embedding_length") or 0))
    forced = _forced(settings, layout, top_k)
    if settings.drop_cold_experts:
        steering.drop = DropCold(
            settings.drop_cold_experts,
            top_k,
            renorm=settings.drop_renorm,
            in_prefill=settings.drop_in_prefill,
        )
    if settings.expert_substitute:
        steering.substitute = Substitute(settings.expert_substitute)
    if settings.prefetch:
        steering.temporal = TemporalPrefetch(layers, settings.prefetch)
    if settings.predict_log:
        ranker = Ranker(layers, hook.tap_gates(layers), "f32")
        steering.probe = GateProbe(layers, layout.n_expert, ranker)
    if settings.route_ahead or settings.predict_prefetch:
        _predict(steering, settings, layers, hook, source, forced)
    _warn(settings, top_k)
    policies = (steering.route_ahead, steering.predicted, forced, steering.substitute)
    steering.policies = [policy for policy in policies if policy]
    return steering


def _warn(settings: Settings, top_k: int) -> None:
    if settings.drop_cold_experts and top_k <= 4:
        warnings.warn(
            f"drop_cold_experts with {top_k} experts a token: each of them carries much of the "
            "layer's output; judge it with `routeahead eval`",
            stacklevel=2,
        )
    if settings.drop_cold_experts and settings.route_ahead_compute == "worker":
        warnings.warn(
            "drop_cold_experts keeps what was read early, and with route_ahead_compute='worker' "
            "that depends on timing, and so does the output: 'inline' repeats",
            stacklevel=2,
        )
    looks = settings.drop_cold_experts or settings.expert_substitute
    if looks and (settings.prefetch or settings.predict_prefetch):
        warnings.warn(
            "drop_cold_experts and expert_substitute look at what is in memory, and a prefetcher "
            "changes that: the output depends on how fast its reads are",
            stacklevel=2,
        )


def _forced(settings: Settings, layout: ModelLayout, top_k: int) -> ForcedRouting | None:
    if not settings.replay_routing:
        return None
    trace = read_trace(settings.replay_routing)
    return ForcedRouting(trace, layers=layout.moe_layers, n_expert=layout.n_expert, top_k=top_k)


def _predict(
    steering: Steering,
    settings: Settings,
    layers: Sequence[int],
    hook: GraphHook,
    source: ExpertSource,
    forced: ForcedRouting | None,
) -> None:
    """Adds what predicts by gates, for the policy that wants it."""
    watchdog = Watchdog(len(layers))
    policy: RouteAhead | PredictedPrefetch
    if settings.route_ahead:
        policy = steering.route_ahead = RouteAhead(layers, settings.route_ahead, watchdog)
        read_early = source.read_early
    else:
        policy = steering.predicted = PredictedPrefetch(layers)

        def read_early(layer: int, experts: Sequence[int]) -> None:
            source.protect(layer, experts)
            source.guess(layer, experts, settings.predict_spec_max)

    aware = steering.drop is not None and settings.drop_aware
    steering.ahead = Ahead(
        layers,
        policy,
        Ranker(layers, hook.tap_gates(layers), settings.gate_precision),
        watchdog,
        compute=settings.route_ahead_compute,
        # A guess that is late is of no use; waiting for it would be of less.
        late=settings.route_ahead_late if settings.route_ahead else "pass",
        read_early=read_early,
        resident=source.resident,
        recorded=forced.selection if forced else None,
        cold_share=steering.drop.threshold if steering.drop and aware else 0.0,
    )
