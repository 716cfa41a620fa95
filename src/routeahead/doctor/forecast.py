"""What a run will do on this machine, from short probes of it.

Tokens that miss as much as the run's will are timed on the engine itself. Where they cannot be (the
model is not here, or a token takes too long to try), the time model of a replay stands for them
(`replay.time_model`). A band says how far the figures of the probes were apart, and what forecasts
were off by when they were compared with runs (docs/doctor.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from routeahead.config import Settings
from routeahead.doctor.disk_probe import Disk
from routeahead.doctor.engine_probe import Engine, Misses, Streamed
from routeahead.doctor.memory import Memory
from routeahead.doctor.routing_curve import nearest_curve
from routeahead.experts.layout import ModelLayout
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import replay
from routeahead.replay.time_model import PROJECTIONS, Machine, simulate, simulate_rate
from routeahead.telemetry.route_trace import PHASES, RouteTrace, TraceError, read_trace

_PROBE_ERROR = 0.08  # of a token: what runs differ by from tokens like theirs, on an idle machine
_MODEL_ERROR = 0.25  # what they differ by from the time model (benchmarks/doctor_band.py)
_CURVE_ERROR = 0.06  # of the hit rate: texts differ in their locality
_PROMPT_ERROR = 0.35
_WINDOWS = 8  # pieces of the probe whose times are compared
# Student's t, 5 % above, by degrees of freedom.
_T = (math.inf, 6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89)
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
        full: whether the cache is: what is read takes the place of what is evicted.
    """

    text: str
    hit_rate: float
    trace: RouteTrace | None = None
    misses: Sequence[int] = ()
    full: bool = True


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
    full = result.evictions > result.misses / 2
    return Traffic(text, result.hit_rate, trace, result.misses_by_batch, full)


def _as_decoded(trace: RouteTrace, layout: ModelLayout) -> RouteTrace:
    """The routing as a run follows it that is fed with tokens: a prompt of one, then decodes."""
    kept = trace.slots[np.isin(trace.slots[:, 2], layout.moe_layers)]
    if not len(kept):
        raise TraceError("the recorded routing has none of this model's layers")
    slots = kept[np.lexsort((kept[:, 3], kept[:, 2], kept[:, 1]))].copy()
    slots[:, 0] = np.where(slots[:, 1] == slots[0, 1], PHASES.index("prefill"), 1)
    return RouteTrace.of(slots, layout.bytes_by_layer())


def tokens_like(routed: Traffic, layout: ModelLayout, settings: Settings, count: int) -> Misses:
    """How many experts some tokens of that routing miss in each layer, (tokens, MoE layers).

    Tokens of a recorded routing come in random order, `count` at most, so that any number of them
    is a fair sample. For a curve, misses are scattered at random.
    """
    rng = np.random.default_rng(0)
    if routed.trace:
        tokens = routed.trace.decoded_tokens()
        whole = [token for token in tokens if len(token) == len(layout.moe_layers)]
        misses: Misses = np.asarray(routed.misses)[rng.permutation(whole)[:count]]
        return misses
    top_ks = _top_ks(layout, settings)
    slots = np.zeros(count * sum(top_ks), np.int64)
    slots[: round((1 - routed.hit_rate) * len(slots))] = 1
    scattered = rng.permutation(slots).reshape(count, -1)
    found: Misses = np.add.reduceat(scattered, np.cumsum([0, *top_ks[:-1]]), axis=1)
    return found


def forecast(
    layout: ModelLayout,
    settings: Settings,
    memory: Memory,
    disk: Disk,
    engine: Engine,
    streamed: Streamed | None,
    routed: Traffic,
    *,
    start_s: float,
    here: bool,
) -> Forecast:
    """How a run will do.

    Args:
        streamed: tokens that missed as much as those of `routed`; None if there are none.
        start_s: what the command takes before it loads a model.
        here: whether the model's bytes are on this disk, so that loading it read them.
    """
    if streamed:
        at, steady = _by_probe(engine, streamed, sum(_top_ks(layout, settings)))
    else:
        machine = _machine(layout, settings, disk, engine)
        at = _by_model(layout, settings, machine, routed)
    token_s = at(routed.hit_rate)
    waits = min(1.0, max(0.0, 1 - min(engine.hot_s, token_s) / token_s))
    if streamed:
        error = math.hypot(_PROBE_ERROR, steady, disk.drift * waits)
    else:
        error = math.hypot(_MODEL_ERROR, engine.hot_spread * (1 - waits), disk.spread * waits)
    slow, fast = token_s * math.exp(error), token_s / math.exp(error)
    if routed.trace is None:
        change = min(_CURVE_ERROR, 1 - routed.hit_rate)
        slow *= max(1, at(max(0.0, routed.hit_rate - change)) / token_s)
        fast *= min(1, at(routed.hit_rate + change) / token_s)
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


TokenTime = Callable[[float], float]
"""Seconds of a token by the share of its experts that are in the cache."""


def _by_probe(engine: Engine, streamed: Streamed, routed: int) -> tuple[TokenTime, float]:
    """What misses add, in proportion to their number, and how far a run may be from that.

    Args:
        routed: experts of a token.
    """
    mean, misses = statistics.fmean(streamed.seconds), statistics.fmean(streamed.misses)
    hot = min(engine.hot_s, mean) if misses else mean
    each = (mean - hot) / misses if misses else 0.0
    expected = [hot + each * count for count in streamed.misses]
    return lambda rate: hot + each * routed * (1 - rate), _unsteadiness(streamed.seconds, expected)


def _by_model(
    layout: ModelLayout, settings: Settings, machine: Machine, routed: Traffic
) -> TokenTime:
    def seconds(rate: float) -> float:
        if routed.trace:
            return simulate(routed.trace, routed.misses, machine).token_s
        sizes = layout.bytes_by_layer()
        each = [sizes[layer] for layer in layout.moe_layers]
        return simulate_rate(each, _top_ks(layout, settings), rate, machine).token_s

    return seconds


def _unsteadiness(seconds: Sequence[float], expected: Sequence[float]) -> float:
    """The 90 % prediction interval of one more piece like those that the probe's tokens are cut
    into, whose times are compared with what their misses take: its half length, as a logarithm.

    Source: G. J. Hahn and W. Q. Meeker, "Statistical Intervals" (1991), section 4.7.
    """
    count = min(_WINDOWS, len(seconds))
    cuts = [len(seconds) * index // count for index in range(count + 1)]
    logs = [math.log(sum(seconds[a:b]) / sum(expected[a:b])) for a, b in pairwise(cuts)]
    return _T[count - 1] * statistics.stdev(logs) * math.sqrt(1 + 1 / count)


def _within(value: float, error: float) -> Band:
    return Band(value, value / (1 + error), value * (1 + error))


def _machine(layout: ModelLayout, settings: Settings, disk: Disk, engine: Engine) -> Machine:
    experts = layout.token_bytes(settings.n_expert_used)
    return Machine(
        bandwidth=disk.bandwidth,
        compute_s=engine.hot_s / len(layout.moe_layers),
        latency_s=disk.latency_s,
        lanes=settings.io_threads,
        reads=1 if len(layout.pieces) == len(layout.moe_layers) else PROJECTIONS,
        overlap=settings.overlap,
        expert_share=experts / (experts + _read_by_a_token(layout)),
    )


def _read_by_a_token(layout: ModelLayout) -> int:
    """Bytes of the dense weights that a token reads: of the embeddings it takes one row, unless
    they are the output matrix, too."""
    names = {tensor.name: tensor.nbytes for tensor in layout.dense}
    unused = names.get("token_embd.weight", 0) if "output.weight" in names else 0
    return layout.dense_bytes - unused


def _top_ks(layout: ModelLayout, settings: Settings) -> list[int]:
    """Experts that a token routes to, by MoE layer."""
    return [settings.n_expert_used or layout.top_k(layer) for layer in layout.moe_layers]


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
