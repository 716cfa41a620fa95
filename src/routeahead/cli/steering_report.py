"""What policies, prefetchers and probe did: for `--report`, and as the lines that `run` prints."""

from __future__ import annotations

from typing import Any

from routeahead.engine.llama import Llama
from routeahead.engine.policies import Steering
from routeahead.experts.layout import MIB
from routeahead.policies.probe import PREDICTORS, Probe, Score
from routeahead.prediction.predictions import Ahead


def facts(llm: Llama) -> dict[str, Any]:
    """A key for each of them that is on."""
    steering, found = llm.steering, dict[str, Any]()
    if steering.route_ahead and steering.ahead:
        counts = steering.route_ahead.counts
        found["route_ahead"] = {
            "depth": steering.route_ahead.depth,
            "committed": counts.committed,
            "passed_through": counts.passed_through,
            "by_reason": dict(counts.by_reason),
            "slots": counts.slots,
            "agreed_slots": counts.agreed_slots,
            "by_layer": {layer: vars(one) for layer, one in counts.by_layer.items()},
            **_prediction(llm, steering.ahead),
        }
    if steering.predicted and steering.ahead:
        found["predict_prefetch"] = {
            "slots": steering.predicted.slots,
            "agreed_slots": steering.predicted.agreed_slots,
            **_prediction(llm, steering.ahead),
        }
    if steering.drop:
        drop = steering.drop
        found["drop"] = {
            "threshold": drop.threshold, "routed": drop.routed, "dropped": drop.dropped,
        }  # fmt: skip
    if steering.substitute:
        slots, substituted = steering.substitute.slots, steering.substitute.substituted
        found["substitute"] = {"slots": slots, "substituted": substituted}
    if steering.probe:
        found["predictors"] = _predictors(steering.probe.probe)
    source = _prefetch_source(steering)
    if source and llm.source:
        found["prefetch"] = {
            "source": source,
            **vars(llm.source.prefetch),
            "bytes": llm.source.lanes.early_bytes,
        }
    return found


def _prefetch_source(steering: Steering) -> str:
    if steering.route_ahead:
        return "route-ahead"
    if steering.predicted:
        return "predicted"
    return "temporal" if steering.temporal else ""


def _prediction(llm: Llama, ahead: Ahead) -> dict[str, Any]:
    """The watchdog's findings, and ms a decoded token (`prediction.predictions.AheadTimes`)."""
    tokens, watchdog = llm.counters.decode.tokens or 1, ahead.watchdog
    seconds = vars(ahead.times) | {"adopt_s": llm.counters.decode.adopt_s}
    return {
        "watched_slots": watchdog.slots,
        "reproduced_slots": watchdog.reproduced,
        "disarmed": watchdog.disarmed,
        **{f"{name[:-2]}_ms_per_tok": 1e3 * value / tokens for name, value in seconds.items()},
    }


def _predictors(probe: Probe) -> dict[str, Any]:
    """Slot overlap and whole-routing accuracy, 0..1; None where there was nothing to score."""

    def score(one: Score) -> dict[str, float | int | None]:
        return {"overlap": one.overlap, "accuracy": one.accuracy, "routings": one.routings}

    return {
        name: score(probe.total(name))
        | {"by_layer": {layer: score(one) for layer, one in probe.scores[name].items()}}
        for name in PREDICTORS
    }


def lines(llm: Llama) -> list[str]:
    """One or more for each of them that is on."""
    report = facts(llm)
    shown = [line(report[name]) for name, line in _LINES.items() if name in report]
    for name, label in (("route_ahead", "moe-route-ahead"), ("predict_prefetch", "moe-predict")):
        if name in report:
            shown += _cost_lines(label, report[name])
    if llm.steering.probe:
        shown += _probe_lines(llm.steering.probe.probe)
    return shown


def _route_ahead_line(facts: dict[str, Any]) -> str:
    return (
        f"moe-route-ahead: {facts['depth']} layers early — {facts['committed']} routings "
        f"committed, {facts['passed_through']} passed through; committed selection agreed with "
        f"the router on {_share(facts['agreed_slots'], facts['slots'])} of slots"
    )


def _predicted_line(facts: dict[str, Any]) -> str:
    named = _share(facts["agreed_slots"], facts["slots"])
    return f"moe-predict: the next layer's router, asked a layer early, named {named} of its slots"


def _prefetch_line(facts: dict[str, Any]) -> str:
    return (
        f"moe-prefetch: {facts['bytes'] // MIB} MiB ahead, {facts['useful']}/{facts['issued']} "
        f"experts useful ({_share(facts['useful'], facts['issued'])}) [{facts['source']}]"
    )


def _drop_line(facts: dict[str, Any]) -> str:
    part = _share(facts["dropped"], facts["routed"])
    return (
        f"moe-drop: {facts['dropped']}/{facts['routed']} ({part}), "
        f"threshold {facts['threshold']:.4f}"
    )


def _substitute_line(facts: dict[str, Any]) -> str:
    part = _share(facts["substituted"], facts["slots"])
    return f"moe-substitute: {facts['substituted']}/{facts['slots']} slots ({part}) given away"


_LINES = {
    "route_ahead": _route_ahead_line,
    "predict_prefetch": _predicted_line,
    "prefetch": _prefetch_line,
    "drop": _drop_line,
    "substitute": _substitute_line,
}


def _cost_lines(label: str, facts: dict[str, Any]) -> list[str]:
    """What predicting cost, and whether it has been given up."""
    gemv, issue, wait, adopt, watchdog = (
        f"{facts[f'{name}_ms_per_tok']:.2f}"
        for name in ("gemv", "issue", "wait", "adopt", "watchdog")
    )
    cost = (
        f"{label}-cost: ra_gemv_ms/tok {gemv}, ra_issue_ms/tok {issue}, waiting {wait}, "
        f"adopting {adopt}, watchdog {watchdog}"
    )
    disarmed = f"{label}: disarmed: {facts['disarmed']}"
    return [cost, disarmed] if facts["disarmed"] else [cost]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _probe_lines(probe: Probe) -> list[str]:
    """Over all layers, then slot overlap by layer: a column each predictor."""
    shown = ["moe-predict-log: slot overlap with the router's choice (whole routings)"]
    if not probe.sound:
        shown.append(
            "moe-predict-log: THE CONTROL IS OFF: the routers' own choices were not reproduced, so "
            "what is said of the stale gates means nothing"
        )
    for name in PREDICTORS:
        total = probe.total(name)
        shown.append(f"  {name:<15}{_percent(total.overlap):>8} ({_percent(total.accuracy)})")
    widths = [max(8, len(name) + 2) for name in PREDICTORS]
    columns = "".join(f"{name:>{width}}" for name, width in zip(PREDICTORS, widths, strict=True))
    shown.append(f"  layer{columns}")
    for layer in probe.scores[PREDICTORS[0]]:
        overlaps = (_percent(probe.scores[name][layer].overlap) for name in PREDICTORS)
        cells = "".join(f"{o:>{width}}" for o, width in zip(overlaps, widths, strict=True))
        shown.append(f"  {layer:>5}{cells}")
    return shown
