"""Route-ahead: a decoded token's experts are the ones predicted N layers earlier.

The selection of MoE layer L is replaced by the ranking that L's own router gives on the hidden
state that entered the router N MoE layers earlier, in the same token. It is known N layers before
it is used, and because it is then *committed*, a read that it causes is never wasted. The output
changes: how often the router would have chosen the same is counted. (Algorithm: route-ahead of
BigMoeOnEdge.) At a depth of one half, it is known one attention before.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from routeahead.errors import SettingsError
from routeahead.policies.candidates import choose_among
from routeahead.policies.prediction import PredictingPolicy, PredictionSettings
from routeahead.prediction.consumer import Late, Reason
from routeahead.routing.policy import HALF, Model, Policy, Routing
from routeahead.setting import ROUTE_AHEAD, setting
from routeahead.telemetry.counters import Totals, share
from routeahead.types import Floats, Ids

REASONS: tuple[Reason, ...] = get_args(Reason)

# Route-ahead leaves these routings to the router by design; others are worth a look.
EXPECTED: tuple[Reason, ...] = ("structural", "prefill", "spared")

COUNTED_SLOTS = 64  # of a layer, before its agreement is believed

Weights = Literal["true", "predicted"]

_KNOWN = "a committed routing is known and read ahead, not guessed"


@dataclass(frozen=True)
class RouteAheadSettings(PredictionSettings):
    """Settings of `RouteAhead`."""

    route_ahead: float = setting(
        0,
        "Commit each decode layer's experts N MoE layers early, so that they are read in time "
        "(lossy); 0.5: from what the layer's own attention is given; 0 is off.",
        ROUTE_AHEAD,
        low=0,
        metavar="N",
        excludes={
            "predict_log": "what it scores is the router's choice, which is replaced",
            "prefetch": _KNOWN,
            "predict_prefetch": _KNOWN,
            "expert_substitute": "a committed routing cannot be chosen again",
        },
    )
    route_ahead_late: Late = setting(
        "wait",
        "A prediction that is late is waited for ('wait', so that the output does not depend on "
        "timing) or left to the router ('pass').",
        ROUTE_AHEAD,
        needs=("route_ahead",),
    )
    route_ahead_weights: Weights = setting(
        "true",
        "A committed expert's weight: its own router's ('true'), or what was predicted with it "
        "('predicted', which spares route_ahead_compute='graph' the products).",
        ROUTE_AHEAD,
        needs=("route_ahead",),
    )

    route_ahead_skip: int = setting(
        0,
        "Predict nothing from the first K MoE layers, which know least of what is to come.",
        ROUTE_AHEAD,
        low=0,
        metavar="K",
        needs=("route_ahead",),
    )
    route_ahead_min_agreement: float = setting(
        0.0,
        "Leave a layer to its router where that agrees with less than this share of the predicted "
        "slots, by the calibration's or the run's own count; what is predicted is a guess there.",
        ROUTE_AHEAD,
        low=0,
        high=1,
        metavar="A",
        needs=("route_ahead",),
    )
    route_ahead_candidates: int | None = setting(
        None,
        "Read M more of the predicted experts than a layer uses (fewer, if M is negative), and let "
        "its own router choose among them and what the cache has.",
        ROUTE_AHEAD,
        metavar="M",
        unset="the predicted experts are used",
        needs=("route_ahead",),
        asks_cache=True,
        excludes={
            "drop_cold_experts": "what is dropped would have been read early",
            "replay_routing": "a forced routing cannot be chosen again",
        },
    )
    route_ahead_gates: Path | None = setting(
        None,
        "Predict by the matrices that `routeahead calibrate` fitted to this model.",
        ROUTE_AHEAD,
        metavar="FILE",
        needs=("route_ahead",),
    )

    def check(self) -> None:
        if self.route_ahead != HALF and not float(self.route_ahead).is_integer():
            raise SettingsError(
                f"route_ahead is {self.route_ahead}: give a whole number of MoE layers, or {HALF}"
            )
        if self.route_ahead == HALF and self.route_ahead_compute != "inline":
            raise SettingsError(
                f"route_ahead={HALF} predicts a layer while it runs, which is done in the graph's "
                "callback: use route_ahead_compute='inline'"
            )
        candidates = self.route_ahead_candidates is not None
        if candidates and self.route_ahead_weights == "predicted":
            raise SettingsError(
                "route_ahead_candidates asks the layer's own router, which gives the weights too: "
                "leave route_ahead_weights='predicted' out"
            )
        if self.route_ahead_compute != "graph":
            return
        if candidates:
            raise SettingsError(
                "route_ahead_candidates asks the layer's own router, and with "
                "route_ahead_compute='graph' it ranks for another layer: use 'inline' or 'worker'"
            )
        if not self.route_ahead:
            raise SettingsError(
                "route_ahead_compute='graph' gives a router's product to a later layer, and "
                "predict_prefetch wants its own choice: use 'inline' or 'worker'"
            )
        if self.router_precision != "f32":
            raise SettingsError(
                "route_ahead_compute='graph' multiplies by the model's own matrices: leave "
                "router_precision out, or use 'inline'"
            )

    def make(self, model: Model) -> Policy | None:
        if not self.route_ahead:
            return None
        depth = HALF if self.route_ahead == HALF else int(self.route_ahead)
        return RouteAhead(depth, late=self.route_ahead_late, options=self)


@dataclass
class Agreement:
    """Agreement of committed routings with the router.

    Attributes:
        slots: committed.
        agreed_slots: those of experts that the router had chosen as well, in whatever order.
    """

    slots: int = 0
    agreed_slots: int = 0


@dataclass
class AheadCounts:
    """What became of each routing, which is one layer's top-k of one ubatch.

    Attributes:
        by_layer: agreement in each MoE layer.
        committed: replaced by a prediction.
        by_reason: left to the router, and why.
    """

    by_layer: dict[int, Agreement]
    committed: int = 0
    by_reason: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    @property
    def slots(self) -> int:
        return sum([one.slots for one in self.by_layer.values()])

    @property
    def agreed_slots(self) -> int:
        return sum([one.agreed_slots for one in self.by_layer.values()])

    @property
    def passed_through(self) -> int:
        """Routings that were to be committed and were not."""
        return sum([count for why, count in self.by_reason.items() if why not in EXPECTED])


class RouteAhead(PredictingPolicy):
    """Commits predictions.

    A *ranking* belongs to one decode step, told by its serial number: one that was made in an
    earlier step is never committed, whatever went wrong in between.

    Attributes:
        depth: N, in MoE layers, or HALF.
        counts: what became of each routing.
    """

    name = "route_ahead"
    reads_early = "route-ahead"

    def __init__(
        self, depth: float, *, late: Late = "wait", options: RouteAheadSettings | None = None
    ) -> None:
        """Commits what is predicted `depth` MoE layers early, or at HALF; `late` is what if it is
        not ready."""
        super().__init__()
        self.depth, self._late = depth, late
        self._options = options or RouteAheadSettings()
        self._missing: dict[int, Reason] = {}  # why there is no ranking

    def bind(self, model: Model) -> None:
        self.counts = AheadCounts({layer: Agreement() for layer in model.layers})
        more = self._options.route_ahead_candidates
        least = min(model.top_k_by_layer.values(), default=model.top_k)
        if more is not None and least + more < 1:
            raise SettingsError(
                f"route_ahead_candidates is {more}, and a layer of this model uses {least} "
                f"experts: give at least {1 - least}"
            )
        first = int(self.depth) + self._options.route_ahead_skip
        self._first, self._experts = frozenset(model.layers[:first]), model.experts
        if first >= len(model.layers):
            warnings.warn(
                f"route_ahead={self.depth} commits nothing: the model has {len(model.layers)} MoE "
                f"layers, and the first {first} of a token are left to their routers",
                stacklevel=2,
            )
        self.predict_for(
            model,
            self._options,
            late=self._late,
            read_early=self._read,
            skip=self._options.route_ahead_skip,
            weighing=self._options.route_ahead_weights == "predicted",
            more=more,
        )

    def commits(self, layer: int) -> bool:
        """Whether the layer's routing is committed if there is a ranking for it. Changes at the
        layer's own routings only, so that it says the same from the prediction to the commit."""
        least = self._options.route_ahead_min_agreement
        if not least:
            return True
        known, counted = self.predictions.ranker.expected(layer), self.counts.by_layer[layer]
        if known is None and counted.slots >= COUNTED_SLOTS:
            known = counted.agreed_slots / counted.slots
        return known is None or known >= least

    def _read(self, layer: int, experts: Sequence[int]) -> None:
        read = self._experts.read_early if self.commits(layer) else self._experts.guess
        read(layer, experts)

    def next_step(self) -> None:
        super().next_step()
        self._missing.clear()

    def cannot_predict(self, layer: int, reason: Reason) -> None:
        self._missing[layer] = reason

    def routed(self, routing: Routing) -> None:
        self.predictions.settle(routing)
        self._commit(routing)

    def _commit(self, routing: Routing) -> None:
        layer, counts = routing.layer, self.counts
        reason = self._obstacle(routing)
        if reason:
            counts.by_reason[reason] += 1
            return
        ranking = self.take(layer)
        assert ranking is not None
        if len(ranking.ids) != len(routing.ids):  # rows whose output nobody wants stop before here
            counts.by_reason["fewer_rows"] += 1
            return
        chosen = self._among_candidates(routing, ranking.ids)
        commits = self.commits(layer)
        if self.predictions.compares(routing) or not commits:
            agreement = counts.by_layer[layer]
            agreement.slots += chosen.size
            for row, router in zip(chosen.tolist(), routing.ids.tolist(), strict=True):
                agreement.agreed_slots += len(set(row).intersection(router))
        if not commits:
            counts.by_reason["spared"] += 1
            return
        counts.committed += 1
        routing.choose(chosen)
        self.predictions.weigh(routing, ranking)

    def _among_candidates(self, routing: Routing, predicted: Ids) -> Ids:
        """What is committed: the predicted experts, or what the router chooses among them."""
        if self._options.route_ahead_candidates is None:
            return predicted

        def scores() -> Floats:
            found = routing.scores()
            assert found is not None  # of a layer whose top-k ranks: others are never predicted for
            return found

        return choose_among(routing.ids, scores, predicted, routing.cached)

    def _obstacle(self, routing: Routing) -> Reason | None:
        if routing.phase == "prefill":
            return "prefill"
        if routing.layer in self._first:
            return "structural"
        if not self.predictions.watchdog.armed:
            return "disarmed"
        # At half a layer, a batch that nobody announced has begun before its first layer was seen.
        absent: Reason = "unreadable" if self.depth == HALF else "late"
        return None if routing.layer in self else self._missing.get(routing.layer, absent)

    def count(self, totals: Totals) -> None:
        super().count(totals)
        counts = self.counts
        totals.committed += counts.committed
        totals.passed_through += counts.passed_through
        totals.compared_slots += counts.slots
        totals.agreed_slots += counts.agreed_slots

    def report(self, decode: Totals) -> dict[str, Any]:
        counts = self.counts
        return {
            "depth": self.depth,
            "candidates": self._options.route_ahead_candidates,
            "committed": counts.committed,
            "passed_through": counts.passed_through,
            "by_reason": dict(counts.by_reason),
            "slots": counts.slots,
            "agreed_slots": counts.agreed_slots,
            "by_layer": {layer: vars(one) for layer, one in counts.by_layer.items()},
            **self.predictions.facts(decode),
        }

    def lines(self, decode: Totals) -> list[str]:
        counts, more = self.counts, self._options.route_ahead_candidates
        read = f"top-k {more:+}" if more else "top-k"
        choice = "" if more is None else f", chosen among {read} and the cache"
        return [
            f"moe-route-ahead: {self.depth} layers early{choice} — {counts.committed} routings "
            f"committed, {counts.passed_through} passed through; committed selection agreed with "
            f"the router on {share(counts.agreed_slots, counts.slots)} of slots",
            *self.predictions.lines("moe-route-ahead", decode),
        ]
