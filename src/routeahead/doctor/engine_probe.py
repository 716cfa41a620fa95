"""The engine on the model itself, for a few tokens whose routing is chosen: all hits, then none."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from routeahead.config import Settings
from routeahead.engine.llama import Llama
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.routing.policy import Model, Policy, Routing

_ROWS = 32  # of the prompt that is timed
_HOT, _COLD = 12, 6  # tokens at most
_BUDGET_S = 4.0  # for each kind of token
_WARM = 2  # tokens of each kind before those that count


@dataclass(frozen=True)
class Engine:
    """What a start and a few tokens took. Seconds and bytes.

    Attributes:
        load_s: reading the dense weights included.
        dense_bytes: of the tensors that were loaded.
        hot_s: a token that misses nothing, the median; `hot_spread` its quartiles' half distance,
            as a share.
        cold_s: a token that misses everything, the median; None if one takes too long to try.
        row_s: a row of a prompt that misses nothing.
        buffers: what llama.cpp allocated, such as "KV" and "compute" → bytes.
        context: tokens of the context for which it did.
        rows: of a prompt that are evaluated at once.
        threads: that computed.
    """

    load_s: float
    dense_bytes: int
    hot_s: float
    hot_spread: float
    cold_s: float | None
    row_s: float
    buffers: dict[str, int]
    context: int
    rows: int
    threads: int


class _Chosen(Policy):
    """Routes every row of a layer to the same experts, from `first` on."""

    name = "chosen"
    first = 0

    def bind(self, model: Model) -> None:
        self._n_expert = model.n_expert

    def routed(self, routing: Routing) -> None:
        rows, top_k = routing.ids.shape
        ids = (self.first + np.arange(top_k)) % self._n_expert
        if rows:
            routing.choose(np.tile(ids, (rows, 1)))


def probe_engine(
    model: Path, settings: Settings, *, threads: int | None, context: int, expected_cold_s: float
) -> Engine:
    """Loads a model with a cache of one token's experts and evaluates some rows.

    Args:
        settings: those that change what a token costs.
        expected_cold_s: what a token that misses everything will take at least.

    Raises:
        RouteAheadError: the model cannot be used, or does not fit.
    """
    routing = _Chosen()
    plain: dict[str, Any] = {
        name: value
        for name, value in vars(settings).items()
        if name not in ("cache_mb", "cache_floor_mb", "force_cache", "replay_routing")
    }
    llm = Llama(
        model, n_ctx=context, cap_context=True, n_threads=threads, policies=[routing],
        cache_mb=_token_mib(model, settings), **plain,
    )  # fmt: skip
    try:
        rows = [llm.token_bos() if llm.token_bos() >= 0 else 0] * min(_ROWS, llm.room // 4)
        llm.eval(rows)
        begun = time.perf_counter()
        llm.eval(rows)
        row_s = (time.perf_counter() - begun) / len(rows)
        llm.phase = "decode"
        left = llm.room - 2 * len(rows) - 2
        hot = _tokens(llm, routing, min(_HOT, left // 2), 0)
        cold: list[float] = []
        if expected_cold_s < _BUDGET_S / 2:
            cold = _tokens(llm, routing, min(_COLD, left // 2), llm.layout.n_expert_used)
        lower, median, upper = statistics.quantiles(hot, n=4)
        return Engine(
            load_s=llm.counters.load_s,
            dense_bytes=llm.layout.dense_bytes,
            hot_s=median,
            hot_spread=(upper - lower) / 2 / median,
            cold_s=statistics.median(cold) if cold else None,
            row_s=row_s,
            buffers=dict(llm.buffers),
            context=llm.n_ctx(),
            rows=llm.n_batch,
            threads=llm.n_threads,
        )
    finally:
        llm.close()


def _token_mib(model: Path, settings: Settings) -> int:
    """MiB of the experts of one token, rounded up."""
    layout = read_layout(model).loaded()
    return -(-layout.token_bytes(settings.n_expert_used) // MIB)


def _tokens(llm: Llama, routing: _Chosen, count: int, step: int) -> list[float]:
    """Seconds of some decoded tokens, each routed `step` experts further than the one before."""
    found: list[float] = []
    begun = time.perf_counter()
    for index in range(_WARM + count):
        routing.first += step
        before = time.perf_counter()
        llm.eval([1])
        now = time.perf_counter()
        if index >= _WARM:
            found.append(now - before)
        if len(found) >= 2 and now - begun > _BUDGET_S:
            break
    return found
