"""What the page shows, as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import replay
from routeahead.report.runs import Columns, Routes, Run
from routeahead.telemetry.route_trace import PHASES, RouteTrace

CURVE_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
"""Cache sizes of a hit-rate curve, as shares of all experts' bytes."""
CURVE_POLICIES = (Policy.LRU, Policy.DECAY, Policy.BELADY)
CURVE_TOKENS = 256
"""Decoded tokens that a curve is made of at most: a replay of more takes minutes."""
_DECODE = PHASES.index("decode")


# --- the table of runs ---


def summary(run: Run) -> dict[str, str]:
    """Figures of a run's decoded tokens, by what they are called; absent ones are left out."""
    found: dict[str, str] = {}
    steps = run.steps
    if steps:
        wall = float(steps["wall"].mean())
        found["decoded tokens"] = str(len(steps["wall"]))
        found["tokens/s"] = f"{1e3 / wall:.2f}" if wall else "-"
        found["ms a token"] = f"{wall:.1f}"
        for name, label in (("compute", "compute"), ("stall", "stall"), ("mgmt", "management")):
            found[f"{label}, ms"] = f"{steps[name].mean():.1f}"
        looked_up = int(steps["hits"].sum() + steps["misses"].sum())
        if looked_up:
            found["hit rate"] = f"{steps['hits'].sum() / looked_up:.1%}"
        found["MiB read a token"] = f"{steps['bytes_read'].mean() / MIB:.2f}"
    counters = run.report.get("counters", {})
    if {"prompt_tok_per_s", "first_token_s", "peak_rss_bytes"} <= counters.keys():
        found["prompt, tokens/s"] = f"{counters['prompt_tok_per_s']:.1f}"
        found["first token after, s"] = f"{counters['first_token_s']:.2f}"
        found["peak memory, MiB"] = f"{counters['peak_rss_bytes'] / MIB:,.0f}"
    return found


def settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Setting → its value in each run, of those in which the runs differ ("-" where not known).

    Of a single run, the settings that are not null, false or empty.
    """
    found = [dict(run.report.get("settings", {})) for run in runs]
    for one in found:
        if not one.get("temp"):
            one.pop("seed", None)  # nothing was drawn
    names = list(dict.fromkeys(name for one in found for name in one))
    rows = {name: [_shown(one[name]) if name in one else "-" for one in found] for name in names}
    if len(runs) == 1:
        return {name: row for name, row in rows.items() if found[0][name] not in (None, False, [])}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- one token's reads ---


@dataclass(frozen=True)
class Timeline:
    """The reads of one decoded token, in the order in which they began.

    Attributes:
        step: position of the token, as in the traces.
        begin, length: ms, from the first of these reads.
        lane, layer, kind, nbytes: of each read.
    """

    step: int
    begin: npt.NDArray[np.float64]
    length: npt.NDArray[np.float64]
    lane: npt.NDArray[np.int64]
    layer: npt.NDArray[np.int64]
    kind: npt.NDArray[np.str_]
    nbytes: npt.NDArray[np.int64]


def timeline(reads: Columns, step: int | None) -> Timeline | None:
    """The reads of the token at position `step`; None: of one that read as much as the median.

    There is none if no decoded token read anything.

    Raises:
        SettingsError: no read is of a decoded token at `step`.
    """
    decode = reads["phase"] == "decode"
    steps = reads["step"][decode]
    if not len(steps):
        return None
    if step is None:
        step = _median_step(steps, reads["bytes"][decode])
    chosen = decode & (reads["step"] == step)
    if not chosen.any():
        raise SettingsError(
            f"--token {step}: the I/O trace has no read of it: "
            f"give a position from {steps.min()} to {steps.max()}"
        )
    own = {name: values[chosen] for name, values in reads.items()}
    begin = own["time_s"] - own["latency_s"]
    order = np.argsort(begin, kind="stable")
    return Timeline(
        step,
        1e3 * (begin - begin.min())[order],
        1e3 * own["latency_s"][order],
        *(own[name][order] for name in ("lane", "layer", "kind", "bytes")),
    )


def _median_step(steps: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> int:
    names, index = np.unique(steps, return_inverse=True)
    total = np.bincount(index, weights=nbytes)
    return int(names[np.argsort(total, kind="stable")[(len(names) - 1) // 2]])


# --- the cache ---


@dataclass(frozen=True)
class Curve:
    """Decode hit rates (0 to 1) of a replay by cache size.

    Attributes:
        mib: sizes, ascending.
        rates: eviction → hit rate at each size.
        tokens: decoded tokens replayed.
    """

    mib: Sequence[float]
    rates: Mapping[Policy, Sequence[float]]
    tokens: int


def curve(routes: Routes, n_expert: int | None = None) -> Curve | None:
    """Replays a routing trace at several cache sizes; None if it decodes nothing.

    Args:
        n_expert: experts a layer, for the size of all; None: those that the trace names.
    """
    trace = routes.trace
    if not trace.decoded_tokens():
        return None
    trace = trace.counting(0, CURVE_TOKENS)
    count = n_expert or 1 + int(trace.slots[:, 4].max())
    total = count * sum(trace.expert_bytes.values())
    sizes = [round(share * total) for share in CURVE_SHARES]
    rates = {
        policy: [replay(trace, size, policy).hit_rate for size in sizes]
        for policy in CURVE_POLICIES
    }
    return Curve([size / MIB for size in sizes], rates, len(trace.decoded_tokens()))


def measured_hit_rate(run: Run) -> tuple[float, float] | None:
    """The cache in MiB and the decode hit rate (0 to 1) that the run itself had."""
    counters = run.report.get("counters", {})
    if not {"cache_bytes", "decode_hits", "decode_misses"} <= counters.keys():
        return None
    looked_up = counters["decode_hits"] + counters["decode_misses"]
    if not looked_up or not counters["cache_bytes"]:
        return None
    return counters["cache_bytes"] / MIB, counters["decode_hits"] / looked_up


# --- predictions, and what is routed to ---

ByLayer = Mapping[int, float]


def agreement(run: Run) -> dict[str, ByLayer]:
    """What was predicted → MoE layer → share (0 to 1) of slots that the router chose as well.

    Of `--route-ahead` (the report's, or the trace's where there is none) and `--predict-log`.
    """
    found: dict[str, ByLayer] = {}
    ahead = run.report.get("route_ahead", {})
    counted = {
        int(layer): one["agreed_slots"] / one["slots"]
        for layer, one in ahead.get("by_layer", {}).items()
        if one.get("slots")
    }
    if not counted and run.routes:
        counted = _committed_agreement(run.routes)
    if counted:
        found[f"route-ahead {ahead['depth']}" if "depth" in ahead else "committed"] = counted
    for name, one in run.report.get("predictors", {}).items():
        layers = {
            int(layer): facts["overlap"]
            for layer, facts in one.get("by_layer", {}).items()
            if facts.get("overlap") is not None
        }
        if layers:
            found[name] = layers
    return found


def _committed_agreement(routes: Routes) -> dict[int, float]:
    """Of each committed routing, the slots whose expert the router had in any of its own."""
    if routes.committed is None or routes.router is None:
        return {}
    agreed: dict[int, list[int]] = {}
    chosen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    rows = zip(
        *routes.trace.slots[:, [1, 2, 4]].T.tolist(),
        routes.router.tolist(),
        routes.committed.tolist(),
        strict=True,
    )
    for step, layer, expert, router, committed in rows:
        if committed and router >= 0:  # -1: it was not asked
            chosen.setdefault((step, layer), []).append((expert, router))
    for (_, layer), slots in chosen.items():
        counts = agreed.setdefault(layer, [0, 0])
        counts[0] += len({e for e, _ in slots} & {r for _, r in slots})
        counts[1] += len(slots)
    return {layer: same / count for layer, (same, count) in sorted(agreed.items())}


@dataclass(frozen=True)
class HotExperts:
    """How often decoded tokens routed to each expert.

    Attributes:
        layers: MoE layers, ascending.
        share: float64 (layers, experts), of the decoded tokens that used it.
        half: share (0 to 1) of all experts that half of the routed slots went to.
    """

    layers: Sequence[int]
    share: npt.NDArray[np.float64]
    half: float


def hot_experts(trace: RouteTrace, n_expert: int | None = None) -> HotExperts | None:
    """None if nothing was decoded; `n_expert` as in `curve`."""
    phase, _, layer, _, expert = trace.slots.T
    layer, expert = layer[phase == _DECODE], expert[phase == _DECODE]
    if not len(layer):
        return None
    layers = sorted(trace.expert_bytes)
    counts = np.zeros((len(layers), max(n_expert or 0, 1 + int(expert.max()))))
    np.add.at(counts, (np.searchsorted(layers, layer), expert), 1)
    ordered = np.sort(counts.ravel())[::-1]
    enough = 1 + int(np.searchsorted(np.cumsum(ordered), ordered.sum() / 2))
    tokens = len(trace.decoded_tokens())
    return HotExperts(layers, counts / tokens, enough / counts.size)
