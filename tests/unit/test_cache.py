"""The expert cache: what stays, what is evicted, and when."""

from __future__ import annotations

import pytest

from routeahead.experts.cache import ExpertCache
from routeahead.experts.eviction import eviction
from routeahead.types import CachePolicy


def test_early_experts_stay_until_the_batch_after_theirs() -> None:
    cache = ExpertCache(4, {0: 1, 1: 1, 2: 1})
    cache.lookup(1, [0, 1])
    cache.lookup(0, [0, 1])
    assert cache.admit_early(1, [0, 7]) == [7]  # 0 is resident and protected, 7 is read
    assert (cache.misses, cache.used, cache.protected) == (5, 5, 2)
    assert not cache.would_hit(1, 7) and cache.would_hit(1, 0)
    assert cache.lookup(0, [5, 6]).victims == [(1, 1), (0, 0)]  # not (1, 0), though it is older
    outcome = cache.lookup(1, [0, 7])
    assert outcome.misses == [] and outcome.victims == [(0, 1)]
    assert (cache.hits, cache.misses, cache.used) == (1, 7, 4)
    assert cache.protected == 2
    cache.lookup(2, [0, 1])
    assert cache.protected == 0 and cache.used == 4


def test_nothing_is_evicted_for_early_experts_before_their_layer() -> None:
    cache = ExpertCache(2, {0: 1, 1: 1})
    cache.lookup(0, [0, 1])
    assert cache.admit_early(1, [0, 1]) == [0, 1] and cache.used == 4
    assert cache.lookup(0, [0, 1]).victims == []
    assert cache.lookup(1, [0, 1]).victims == [(0, 0), (0, 1)]


@pytest.mark.parametrize("policy", ["lru", "decay"])
def test_what_is_read_early_twice_for_a_layer_stays(policy: CachePolicy) -> None:
    cache = ExpertCache(2, {0: 1, 1: 1}, eviction(policy, 8))
    assert cache.admit_early(1, [0]) == [0] and cache.admit_early(1, [0, 1]) == [1]
    cache.protect(1, [0])
    assert cache.protected == 2 and cache.used == 2
    assert cache.lookup(0, [4, 5]).victims == []
    outcome = cache.lookup(1, [0, 1])
    assert outcome.misses == [] and sorted(outcome.victims) == [(0, 4), (0, 5)]
    assert cache.hits == 0 and cache.used == 2


def test_unused_early_experts_become_ordinary() -> None:
    cache = ExpertCache(2, {0: 1, 1: 1})
    cache.admit_early(1, [0, 1])
    assert cache.lookup(1, [2, 3]).victims == []  # 0 and 1 may still be on their way
    assert cache.lookup(0, [4]).victims[:2] == [(1, 0), (1, 1)]
    cache.admit_early(1, [5])
    cache.release()
    assert cache.protected == 0
    cache.lookup(0, [4])
    assert cache.used <= 2


def test_what_was_predicted_stays() -> None:
    """Of a later layer, until the batch after its own; what is absent is not admitted."""
    cache = ExpertCache(3, {0: 1, 1: 1, 2: 1})
    cache.lookup(1, [0, 1])
    cache.lookup(0, [5])
    cache.protect(1, [0, 7])
    assert cache.protected == 1 and len(cache) == 3
    assert cache.lookup(2, [6]).victims == [(1, 1)]  # 0 is older
    cache.lookup(1, [9])
    assert (1, 0) in cache
    assert (1, 0) in cache.lookup(2, [4, 5]).victims
