"""Replays a routing trace through a cache: the hits and misses that the engine would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from routeahead.errors import SettingsError
from routeahead.replay.eviction import Policy, make_cache
from routeahead.telemetry.route_trace import RouteTrace, TraceError


@dataclass(frozen=True)
class ReplayResult:
    """Hits and misses of a cache on a trace. Totals are of decode; prefill only fills the cache.

    Attributes:
        budget: bytes.
        tokens: decoded tokens.
        evictions: entries dropped, by the lookup that dropped them.
        bytes_read: bytes of the experts that were missing.
        misses_by_batch: experts that were missing, for each batch of the trace, prefill included.
    """

    policy: Policy
    budget: int
    tokens: int
    hits: int
    misses: int
    evictions: int
    bytes_read: int
    misses_by_batch: Sequence[int] = field(repr=False)

    @property
    def hit_rate(self) -> float:
        """Share of the decode lookups that found their expert in memory, 0 to 1."""
        return self.hits / (self.hits + self.misses)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / self.tokens


def replay(trace: RouteTrace, budget: int, policy: Policy) -> ReplayResult:
    """Sends all batches of `trace` through a cache of `budget` bytes.

    Raises:
        SettingsError: the budget is negative.
        TraceError: the trace decodes no token.
    """
    if budget < 0:
        raise SettingsError(f"cache of {budget} bytes: give a size of 0 or more")
    tokens = len(trace.decoded_tokens())
    if not tokens:
        raise TraceError("the trace has no decoded token: nothing to count")
    cache = make_cache(policy, budget, trace)
    misses_by_batch: list[int] = []
    lookups = misses = evictions = bytes_read = 0
    for batch in trace.batches:
        outcome = cache.lookup(batch.layer, batch.experts, batch.rows)
        missing = len(outcome.misses)
        misses_by_batch.append(missing)
        if batch.phase == "decode":
            lookups += len(batch.experts)
            misses += missing
            evictions += len(outcome.victims)
            bytes_read += missing * trace.expert_bytes[batch.layer]
    return ReplayResult(
        policy, budget, tokens, lookups - misses, misses, evictions, bytes_read, misses_by_batch
    )
