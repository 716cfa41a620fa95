"""The probe: scores how well routings could have been predicted, and changes nothing.

It computes on the evaluation thread, so a probed run is slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from routeahead.policies.settings import PolicySettings
from routeahead.prediction.scores import (
    DEPTHS,
    PREDICTORS,
    PredictorScores,
    Score,
    stale_gate,
)
from routeahead.routing.policy import Model, Policy, Routing
from routeahead.setting import POLICIES, setting
from routeahead.telemetry.counters import Totals
from routeahead.types import Phase


@dataclass(frozen=True)
class ProbeSettings(PolicySettings):
    """Settings of `Probe`."""

    predict_log: bool = setting(
        False,
        "Score how well routings could have been predicted; changes nothing, and is slow.",
        POLICIES,
        excludes={"replay_routing": "this model's routers know nothing of a forced routing"},
    )

    def make(self, model: Model) -> Policy | None:
        return Probe() if self.predict_log else None


class Probe(Policy):
    """Lets routers predict at each decoded layer, and compares when the layers are there.

    Attributes:
        scores: how often each predictor was right.
    """

    name = "predictors"

    def bind(self, model: Model) -> None:
        self.scores = PredictorScores(model.layers, model.n_expert)
        self._model, self._ranker = model, model.ranker("f32")
        self._decoding = False

    def wants_hidden(self, phase: Phase) -> bool:
        return phase == "decode"

    def begin(self, phase: Phase, position: int) -> None:
        self._decoding = phase == "decode"
        self.scores.begin()
        if self._decoding:
            self._ranker.prepare()

    def routed(self, routing: Routing) -> None:
        if self._decoding and routing.hidden is not None and len(routing.ids) == 1:
            for depth in (0, *DEPTHS):
                target = self._model.later(routing.layer, depth)
                if target is not None and target in self._ranker:
                    ranked = self._ranker.rank(target, routing.hidden[0])
                    self.scores.predict(stale_gate(depth), target, ranked)
        self.scores.routed(routing.layer, routing.ids, score=self._decoding)

    def report(self, decode: Totals) -> dict[str, Any]:
        """Slot overlap and whole-routing accuracy, 0..1; None if there was nothing to score."""
        scores = self.scores
        return {
            name: _facts(scores.total(name))
            | {"by_layer": {layer: _facts(one) for layer, one in scores.scores[name].items()}}
            for name in PREDICTORS
        }

    def lines(self, decode: Totals) -> list[str]:
        """Over all layers, then slot overlap by layer: a column each predictor."""
        scores = self.scores
        shown = ["moe-predict-log: slot overlap with the router's choice (whole routings)"]
        if not scores.sound:
            shown.append(
                "moe-predict-log: THE CONTROL IS OFF: the routers' own choices were not "
                "reproduced, so what is said of the stale gates means nothing"
            )
        for name in PREDICTORS:
            total = scores.total(name)
            shown.append(f"  {name:<15}{_percent(total.overlap):>8} ({_percent(total.accuracy)})")
        widths = [max(8, len(name) + 2) for name in PREDICTORS]
        heads = (f"{name:>{width}}" for name, width in zip(PREDICTORS, widths, strict=True))
        shown.append(f"  layer{''.join(heads)}")
        for layer in scores.scores[PREDICTORS[0]]:
            overlaps = (_percent(scores.scores[name][layer].overlap) for name in PREDICTORS)
            cells = "".join(f"{o:>{width}}" for o, width in zip(overlaps, widths, strict=True))
            shown.append(f"  {layer:>5}{cells}")
        return shown


def _facts(one: Score) -> dict[str, float | int | None]:
    return {"overlap": one.overlap, "accuracy": one.accuracy, "routings": one.routings}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
