"""What a run will do on this machine: the time model of a replay, fed with short probes.

A token that misses nothing is timed on the engine itself, and so is one that misses everything; the
time model (`replay.time_model`) has the shape of what lies between. A band says how far the
figures of the probes were apart, and what the model was off by when it was compared with runs
(docs/doctor.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from routeahead.config import Settings
from routeahead.doctor.disk_probe import Disk
from routeahead.doctor.engine_probe import Engine
from routeahead.doctor.memory import Memory
from routeahead.doctor.routing_curve import nearest_curve
from routeahead.experts.layout import ModelLayout
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import replay
from routeahead.replay.time_model import Machine, TimeModel, simulate, simulate_rate
from routeahead.telemetry.route_trace import PHASES, RouteTrace, TraceError, read_trace

_MODEL_ERROR = 0.25  # of a token: what runs differ by from the model (benchmarks/doctor_band.py)
_CURVE_ERROR = 0.06  # of the hit rate: texts differ in their locality
_PROMPT_ERROR = 0.35
_WORST = 0.5  # however unsteady the probes were
_ROWS = 512  # tokens of the prompt that is forecast
_GREETING = 16  # of the one of a cold start


@dataclass(frozen=True)
class Band:
    """A figure, and the range in which a run's should lie."""

    value: float
    low: float
    high: float

    def __contains__(self, figure: float) -> bool:
        return self.low <= figure <= self.high


@dataclass(frozen=True)
class Traffic:
    """The routing that a forecast is for.

    Attributes:
        text: what it is, for a reader.
        hit_rate: share of a decoded token's experts that are in the cache.
        trace: the recorded routing that is replayed; None if a curve stands for it.
        misses: of each batch of the trace.
    """

    text: str
    hit_rate: float
    trace: RouteTrace | None = None
    misses: Sequence[int] = ()


@dataclass(frozen=True)
class Forecast:
    """Seconds, and tokens a second.

    Attributes:
        decode: tokens a second, once the cache is full.
        token_s, stall_s: of a decoded token, and what of it waits for bytes.
        prompt: tokens a second of a prompt of 512.
        cold_start_s: from the command to the first token of a prompt of 16.
    """

    decode: Band
    token_s: float
    stall_s: float
    prompt: Band
    cold_start_s: Band


def traffic(
    layout: ModelLayout, settings: Settings, memory: Memory, *, warmup: int, tokens: int | None
) -> Traffic:
    """The recorded routing of the settings, replayed; else the curve nearest to the model.

    Args:
        warmup: decoded tokens of the recorded routing that only fill the cache.
        tokens: decoded tokens that count after them; None for all.

    Raises:
        TraceError: the recorded routing cannot be read, or is too short.
    """
    if not settings.replay_routing:
        curve = nearest_curve(layout)
        return Traffic(str(curve), curve.hit_rate(memory.share))
    trace = _as_decoded(read_trace(settings.replay_routing), layout).counting(warmup, tokens)
    result = replay(trace, memory.cache, Policy(settings.cache_policy))
    text = f"the recorded routing {settings.replay_routing}"
    return Traffic(text, result.hit_rate, trace, result.misses_by_batch)


def _as_decoded(trace: RouteTrace, layout: ModelLayout) -> RouteTrace:
    """The routing as a run follows it that is fed with tokens: a prompt of one, then decodes."""
    kept = trace.slots[np.isin(trace.slots[:, 2], layout.moe_layers)]
    if not len(kept):
        raise TraceError("the recorded routing has none of this model's layers")
    slots = kept[np.lexsort((kept[:, 3], kept[:, 2], kept[:, 1]))].copy()
    slots[:, 0] = np.where(slots[:, 1] == slots[0, 1], PHASES.index("prefill"), 1)
    return RouteTrace.of(slots, layout.bytes_by_layer())


def forecast(
    layout: ModelLayout,
    settings: Settings,
    memory: Memory,
    disk: Disk,
    engine: Engine,
    routed: Traffic,
    *,
    start_s: float,
    here: bool,
) -> Forecast:
    """How a run will do.

    Args:
        start_s: what the command takes before it loads a model.
        here: whether the model's bytes are on this disk, so that loading it read them.
    """
    machine = _machine(layout, settings, disk, engine)
    times = _times(layout, settings, machine, routed, routed.hit_rate)
    token_s = _corrected(layout, settings, machine, engine, times)
    waits = min(1.0, max(0.0, 1 - engine.hot_s / token_s))
    error = math.hypot(_MODEL_ERROR, engine.hot_spread * (1 - waits), disk.spread * waits)
    error = min(error, _WORST)
    slow, fast = token_s * (1 + error), token_s * (1 - error)
    if routed.trace is None:
        ends = []
        change = min(_CURVE_ERROR, 1 - routed.hit_rate)
        for rate in (max(0.0, routed.hit_rate - change), routed.hit_rate + change):
            found = _times(layout, settings, machine, routed, rate)
            ends.append(_corrected(layout, settings, machine, engine, found))
        slow, fast = slow * max(1, ends[0] / token_s), fast * min(1, ends[1] / token_s)
    load_s = engine.load_s + (0.0 if here else memory.dense / disk.bandwidth)
    prompt_s = _prompt_s(layout, settings, memory, disk, engine, _ROWS)
    greeting_s = start_s + load_s + _prompt_s(layout, settings, memory, disk, engine, _GREETING)
    return Forecast(
        decode=Band(1 / token_s, 1 / slow, 1 / fast),
        token_s=token_s,
        stall_s=token_s * waits,
        prompt=_within(_ROWS / prompt_s, _PROMPT_ERROR),
        cold_start_s=_within(greeting_s, _PROMPT_ERROR),
    )


def _within(value: float, error: float) -> Band:
    return Band(value, value / (1 + error), value * (1 + error))


def _machine(layout: ModelLayout, settings: Settings, disk: Disk, engine: Engine) -> Machine:
    experts = layout.token_bytes(settings.n_expert_used)
    return Machine(
        bandwidth=disk.bandwidth,
        compute_s=engine.hot_s / len(layout.moe_layers),
        latency_s=disk.latency_s,
        lanes=settings.io_threads,
        overlap=settings.overlap,
        expert_share=experts / (experts + _read_by_a_token(layout)),
    )


def _read_by_a_token(layout: ModelLayout) -> int:
    """Bytes of the dense weights that a token reads: of the embeddings it takes one row, unless
    they are the output matrix, too."""
    names = {tensor.name: tensor.nbytes for tensor in layout.dense}
    unused = names.get("token_embd.weight", 0) if "output.weight" in names else 0
    return layout.dense_bytes - unused


def _times(
    layout: ModelLayout, settings: Settings, machine: Machine, routed: Traffic, rate: float
) -> TimeModel:
    if routed.trace:
        return simulate(routed.trace, routed.misses, machine)
    sizes = layout.bytes_by_layer()
    top_ks = [settings.n_expert_used or layout.top_k(layer) for layer in sizes]
    return simulate_rate(list(sizes.values()), top_ks, rate, machine)


def _corrected(
    layout: ModelLayout, settings: Settings, machine: Machine, engine: Engine, times: TimeModel
) -> float:
    """Seconds a token: what misses add, as the token that missed everything had it.

    The model leaves out what reads take from compute and what waking a core costs.
    """
    added = times.token_s - engine.hot_s
    if engine.cold_s is None:
        return times.token_s
    nothing = Traffic("", 0.0)
    whole = _times(layout, settings, machine, nothing, 0.0).token_s - engine.hot_s
    seen = engine.cold_s - engine.hot_s
    factor = min(2.0, max(0.7, seen / whole)) if whole > 0 else 1.0
    return engine.hot_s + added * factor


def _prompt_s(
    layout: ModelLayout,
    settings: Settings,
    memory: Memory,
    disk: Disk,
    engine: Engine,
    rows: int,
) -> float:
    """Seconds of a prompt whose rows route independently: reads its experts, then computes."""
    read = 0.0
    for tensor in layout.experts:
        used = (settings.n_expert_used or layout.top_k(tensor.layer)) / tensor.n_expert
        read += tensor.expert_bytes * tensor.n_expert * (1 - (1 - used) ** rows)
    resident = memory.share if rows > _GREETING else 0.0  # a cold start has nothing
    read_s, compute_s = read * (1 - resident) / disk.bandwidth, rows * engine.row_s
    # Later layers are read while a layer computes; the first one waits for its own bytes.
    less, more = sorted((read_s, compute_s))
    return more + less / len(layout.moe_layers)
