"""The engine on the model itself, for a few tokens whose routing is chosen.

First tokens that miss nothing; then tokens that miss as many experts, layer by layer, as the run
that is forecast will. What a stop costs, how much of a read is hidden, and what reading takes from
computing are in those tokens' seconds, so nothing of it needs a model.
"""

from __future__ import annotations

import statistics
import time
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.config import Settings
from routeahead.engine.llama import Llama
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.llamacpp.native_log import Buffers
from routeahead.routing.policy import Model, Policy, Routing

Misses = npt.NDArray[np.int64]
"""(tokens, MoE layers): how many of a token's experts are to be absent."""

TOKENS = 160
"""That are tried at most."""

_ROWS = 32  # of the prompt that is timed
_HOT_S, _STREAMED_S = 1.5, 3.0  # for tokens of each kind
_LEAST = 4  # tokens, however long they take
_WARM = 2  # tokens of each kind before those that count


@dataclass(frozen=True)
class Engine:
    """What a start and a few tokens took. Seconds and bytes.

    Attributes:
        load_s: reading the dense weights included.
        dense_bytes: of the tensors that were loaded into host memory.
        hot_s: a token that misses nothing, the median; `hot_spread` its quartiles' half distance,
            as a share.
        row_s: a row of a prompt that misses nothing.
        buffers: what llama.cpp allocated.
        context: tokens of the context for which it did.
        rows: of a prompt that are evaluated at once.
        threads: that computed.
    """

    load_s: float
    dense_bytes: int
    hot_s: float
    hot_spread: float
    row_s: float
    buffers: Buffers
    context: int
    rows: int
    threads: int


@dataclass(frozen=True)
class Streamed:
    """Decoded tokens that missed as many experts as those of a forecast.

    Attributes:
        seconds: of each, in order.
        misses: of each, experts that were read.
    """

    seconds: tuple[float, ...]
    misses: tuple[int, ...]


class _Chosen(Policy):
    """Routes each layer to the experts that were chosen for it before the batch, so that choosing
    takes nothing of a token's time."""

    name = "chosen"

    def bind(self, model: Model) -> None:
        self._experts, self._n_expert = model.experts, model.n_expert
        top_ks = [model.top_k_by_layer.get(layer, model.top_k) for layer in model.layers]
        self.ids = {n: list(range(k)) for n, k in zip(model.layers, top_ks, strict=True)}
        self._next = dict.fromkeys(model.layers, 0)

    def routed(self, routing: Routing) -> None:
        if len(routing.ids):  # a ubatch without output has no row in the last layer
            routing.choose([self.ids[routing.layer]] * len(routing.ids))

    def choose(self, misses: Misses) -> None:
        """Chooses experts of which as many are absent now as `misses` says for each layer."""
        for layer, absent in zip(self.ids, misses.tolist(), strict=True):
            self.ids[layer] = self._with_absent(layer, absent)

    def _with_absent(self, layer: int, absent: int) -> list[int]:
        """As far as there are so many of each kind; those that were used last are kept."""
        before, experts = self.ids[layer], range(self._n_expert)
        top_k, begin = len(before), self._next[layer]
        here = [e for e in (*before, *experts) if self._experts.resident(layer, e)]
        present = list(dict.fromkeys(here))[: top_k - absent]
        rotated = (*experts[begin:], *experts[:begin])
        new = islice((e for e in rotated if e not in here), top_k - len(present))
        chosen = [*new, *present]
        self._next[layer] = (chosen[0] + top_k) % self._n_expert
        return (chosen + [e for e in experts if e not in chosen])[:top_k]


class EngineProbe:
    """A model that is loaded for a few tokens; a context manager."""

    def __init__(
        self, model: Path, settings: Settings, *, threads: int | None, context: int
    ) -> None:
        """
        Loads it, with a cache of three tokens' experts.

        Args:
            settings: those that change what a token costs.

        Raises:
            RouteAheadError: the model cannot be used, or does not fit.
        """
        self._routing = _Chosen()
        plain: dict[str, Any] = {
            name: value
            for name, value in vars(settings).items()
            if name not in ("cache_mb", "cache_floor_mb", "force_cache", "replay_routing")
        }
        self._llm = Llama(
            model, n_ctx=context, cap_context=True, n_threads=threads, policies=[self._routing],
            cache_mb=_cache_mib(model, settings), **plain,
        )  # fmt: skip

    def __enter__(self) -> EngineProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def without_misses(self) -> Engine:
        """Evaluates some rows and decodes some tokens that find everything."""
        llm = self._llm
        rows = [max(0, llm.token_bos())] * min(_ROWS, llm.room // 4)
        llm.eval(rows)
        begun = time.perf_counter()
        llm.eval(rows)
        row_s = (time.perf_counter() - begun) / len(rows)
        hot = self._tokens(_HOT_S, min(24, (llm.room - llm.n_tokens) // 3)).seconds
        lower, median, upper = statistics.quantiles(hot, n=4)
        return Engine(
            load_s=llm.counters.load_s,
            dense_bytes=llm.offload.host_bytes(llm.layout),
            hot_s=median,
            hot_spread=(upper - lower) / 2 / median,
            row_s=row_s,
            buffers=llm.buffers,
            context=llm.n_ctx(),
            rows=llm.n_batch,
            threads=llm.n_threads,
        )

    def streamed(self, misses: Misses, *, cache: int, full: bool) -> Streamed | None:
        """Decodes tokens of which as many experts are absent as `misses` has; None if the context
        has no room for two.

        Args:
            cache: bytes that the run's has.
            full: it is full by then, so that a read lands where an evicted expert was. Otherwise
                reads land in memory that nobody has used yet, which the kernel gives page by page.
        """
        source = self._llm.source
        assert source
        if not full:
            source.resize(cache)  # it keeps its memory: what was given back comes back quickly
        elif cache < source.cache.budget:
            source.cache.budget = cache  # laid out anew, empty
        room = self._llm.room - self._llm.n_tokens - _WARM - 1
        count = min(len(misses), room)
        return self._tokens(_STREAMED_S, count, misses) if count > 1 else None

    def _tokens(self, seconds: float, count: int, misses: Misses | None = None) -> Streamed:
        llm, found, missed = self._llm, list[float](), list[int]()
        begun = time.perf_counter()
        llm.phase = "decode"
        for index in range(-_WARM, count):
            if misses is not None:
                self._routing.choose(misses[index % len(misses)])
            before = copy(llm.counters.decode)
            llm.eval([1])
            step = llm.counters.decode.minus(before)  # as a run counts it
            if index >= 0:
                found.append(step.wall_s)
                missed.append(step.misses)
            if len(found) >= _LEAST and time.perf_counter() - begun > seconds:
                break
        llm.phase = None
        return Streamed(tuple(found), tuple(missed))


def _cache_mib(model: Path, settings: Settings) -> int:
    """MiB of the experts of three tokens, rounded up: what the latest one used stays."""
    layout = read_layout(model).loaded()
    return -(-3 * layout.token_bytes(settings.n_expert_used) // MIB)
