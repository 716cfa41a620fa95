"""Which experts stay in memory: eviction policies to compare with the engine's.

LRU and decay are the engine's own, so that a replay and a run agree exactly (unless memory has no
room for a layer beside a cache of a chosen size: `ExpertCache.spare`). The others do as they do: a
batch's experts are looked up and admitted together, then entries outside of the batch are evicted
until the budget holds. What the batch itself has in excess, and whatever a batch of several rows
was missing, is evicted at the next lookup.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from routeahead.experts.cache import ExpertCache, Outcome
from routeahead.experts.eviction import Key, eviction
from routeahead.telemetry.route_trace import RouteTrace, TraceError
from routeahead.types import Ids

Rank = tuple[float, ...]


class Policy(str, Enum):
    """The names that a user gives."""

    LRU = "lru"
    DECAY = "decay"
    LFU = "lfu"
    BELADY = "belady"
    RANDOM = "random"


class Cache(Protocol):
    """What a replay asks of a cache."""

    def lookup(self, layer: int, experts: Sequence[int], rows: Ids | None = None) -> Outcome: ...


class RankedCache(ABC):
    """A cache within `budget` bytes that evicts the entry of the lowest rank.

    The queue is a heap with one item for every time an entry was ranked; only the item with the
    entry's present rank counts. An entry of the current batch has no rank until the batch's
    evictions are done, so it cannot be evicted by them.

    Attributes:
        evicted_rank: rank of the latest entry to be evicted.
    """

    def __init__(self, budget: int, bytes_by_layer: dict[int, int]) -> None:
        self.budget = budget
        self.used = 0
        self.evicted_rank: Rank = (0.0,)
        self._bytes = bytes_by_layer
        self._ranks: dict[Key, Rank | None] = {}
        self._queue: list[tuple[Rank, Key]] = []

    @abstractmethod
    def rank(self, key: Key) -> Rank:
        """The rank of an entry of the batch just looked up. Called once for each, in order."""

    def lookup(self, layer: int, experts: Sequence[int], rows: Ids | None = None) -> Outcome:
        """See `ExpertCache.lookup`."""
        outcome = Outcome()
        if rows is None:
            self._evict(outcome.victims)
        batch = [(layer, expert) for expert in experts]
        outcome.misses = [key[1] for key in batch if key not in self._ranks]
        self._ranks.update(dict.fromkeys(batch))
        absent = self._bytes[layer] * len(outcome.misses)
        if rows is None:
            self.used += absent
            self._evict(outcome.victims)
        else:
            self._evict(outcome.victims)
            self.used += absent
        for key in batch:
            rank = self._ranks[key] = self.rank(key)
            heapq.heappush(self._queue, (rank, key))
        return outcome

    def _evict(self, victims: list[Key]) -> None:
        while self.used > self.budget and self._queue:
            rank, key = heapq.heappop(self._queue)
            if self._ranks.get(key) != rank:
                continue  # evicted, or used again, since it was given this rank
            del self._ranks[key]
            self.used -= self._bytes[key[0]]
            self.evicted_rank = rank
            victims.append(key)


class LFUCache(RankedCache):
    """Evicts the least frequently used entry; of several, the one whose last use is oldest.

    Uses are counted since the start, also while an expert is not in memory: the variant called
    perfect LFU (Breslau et al. 1999, "Web caching and Zipf-like distributions").
    """

    def __init__(self, budget: int, bytes_by_layer: dict[int, int]) -> None:
        super().__init__(budget, bytes_by_layer)
        self._uses: Counter[Key] = Counter()
        self._clock = 0

    def rank(self, key: Key) -> Rank:
        self._uses[key] += 1
        self._clock += 1
        return (self._uses[key], self._clock)


class BeladyCache(RankedCache):
    """Evicts the entry whose next use is farthest in the future (Belady 1966).

    If all experts have the same size, no policy has more hits; if sizes differ, a better one may
    exist. It must be given the batches of `trace` in order, since it takes the future from there.
    """

    def __init__(self, budget: int, trace: RouteTrace) -> None:
        super().__init__(budget, trace.expert_bytes)
        self._next_uses: dict[Key, deque[int]] = {}
        for index, batch in enumerate(trace.batches):
            for expert in batch.experts:
                self._next_uses.setdefault((batch.layer, expert), deque()).append(index)

    def rank(self, key: Key) -> Rank:
        uses = self._next_uses[key]
        uses.popleft()
        return (-uses[0] if uses else -float("inf"),)


class RandomCache(RankedCache):
    """Evicts a random entry, each with the same probability; the same `seed` evicts the same.

    An entry's rank is the time at which its lifetime ends, drawn from an exponential distribution
    and added to the rank of the latest victim. That distribution has no memory, so whatever the
    history, each entry is equally likely to be next.
    """

    def __init__(self, budget: int, bytes_by_layer: dict[int, int], seed: int = 0) -> None:
        super().__init__(budget, bytes_by_layer)
        self._random = random.Random(seed)

    def rank(self, key: Key) -> Rank:
        return (self.evicted_rank[0] + self._random.expovariate(1.0),)


def make_cache(policy: Policy, budget: int, trace: RouteTrace) -> Cache:
    """An empty cache of `budget` bytes that evicts by `policy`."""
    match policy:
        case Policy.LRU:
            return ExpertCache(budget, trace.expert_bytes)
        case Policy.DECAY:
            return ExpertCache(budget, trace.expert_bytes, eviction("decay", _n_expert(trace)))
        case Policy.LFU:
            return LFUCache(budget, trace.expert_bytes)
        case Policy.BELADY:
            return BeladyCache(budget, trace)
        case Policy.RANDOM:
            return RandomCache(budget, trace.expert_bytes)


_MOST_EXPERTS = 4096  # decay counts every pair of a layer's experts


def _n_expert(trace: RouteTrace) -> int:
    """Experts of a layer, as far as the trace shows.

    Raises:
        TraceError: more than any model has.
    """
    highest = max(max(batch.experts) for batch in trace.batches)
    if highest >= _MOST_EXPERTS:
        raise TraceError(f"expert {highest}: decay takes layers of up to {_MOST_EXPERTS} experts")
    return highest + 1
