"""Replay of a routing trace: the eviction policies.

Expected figures are worked out by hand, by brute force, or by a direct transcription of the replay
rule; none comes from the code under test.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import pytest
from support.traces import decode_trace, one_by_one, random_trace

from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB
from routeahead.replay.eviction import Policy, RandomCache
from routeahead.replay.hits import replay
from routeahead.telemetry.route_trace import Batch, RouteTrace, TraceError, read_trace

Key = tuple[int, int]


@pytest.mark.parametrize(
    ("policy", "experts", "misses"),
    [
        # c evicts a, the least recently used; a evicts b.
        (Policy.LRU, "aabcba", [1, 0, 1, 1, 0, 1]),
        # c evicts b (one use against two), b evicts c (one against two).
        (Policy.LFU, "aabcba", [1, 0, 1, 1, 1, 0]),
        # c evicts a (tie: its use is older). a's uses outlive its eviction, so d evicts b.
        (Policy.LFU, "aabbcada", [1, 0, 1, 0, 1, 1, 1, 0]),
        # c evicts b, whose next use is behind a's; then b evicts c, which has none.
        (Policy.BELADY, "abcaba", [1, 1, 1, 0, 1, 0]),
    ],
)
def test_two_places(policy: Policy, experts: str, misses: list[int]) -> None:
    result = replay(one_by_one(experts), 20, policy)
    assert result.misses_by_batch == misses
    assert (result.hits, result.misses) == (misses.count(0), misses.count(1))
    assert result.hit_rate == misses.count(0) / len(misses)
    assert result.evictions == result.misses - 2
    assert result.bytes_read == 10 * result.misses
    assert result.tokens == len(experts)
    assert result.bytes_per_token == 10 * result.misses / len(experts)


def test_prefill_fills_the_cache_and_is_not_counted() -> None:
    batches = [Batch("prefill", 0, 0, (0, 1, 2)), Batch("decode", 1, 0, (1, 2))]
    for policy in Policy:
        result = replay(RouteTrace({0: 10}, batches), 30, policy)
        assert result.misses_by_batch == [3, 0]
        assert (result.hits, result.misses, result.evictions, result.bytes_read) == (2, 0, 0, 0)


def test_only_the_tokens_asked_for_count_and_those_before_fill_the_cache() -> None:
    trace = random_trace(3, sizes=[10, 20], tokens=9)
    whole = replay(trace, 60, Policy.LRU)
    part = replay(trace.counting(4, 3), 60, Policy.LRU)
    counted = [index for token in trace.decoded_tokens()[4:7] for index in token]
    assert part.tokens == 3
    assert part.misses == sum(whole.misses_by_batch[index] for index in counted) > 0
    assert part.misses_by_batch == whole.misses_by_batch[: counted[-1] + 1]
    assert replay(trace.counting(0), 60, Policy.LRU) == whole
    with pytest.raises(TraceError, match="9 decoded tokens: none is left after 9"):
        trace.counting(9)


@pytest.mark.parametrize("policy", Policy)
def test_a_batch_larger_than_the_budget_leaves_as_much_as_fits(policy: Policy) -> None:
    trace = decode_trace([[[0, 1, 2]]] * 3, [10])
    assert replay(trace, 20, policy).misses_by_batch == [3, 1, 1]
    assert replay(trace, 19, policy).misses_by_batch == [3, 2, 2]
    assert replay(trace, 0, policy).misses_by_batch == [3, 3, 3]


@pytest.mark.parametrize("policy", Policy)
def test_everything_fits(policy: Policy) -> None:
    trace = random_trace(0, sizes=[10, 30], tokens=40)
    result = replay(trace, 6 * 40, policy)
    distinct = {(batch.layer, expert) for batch in trace.batches for expert in batch.experts}
    assert sum(result.misses_by_batch) == len(distinct)
    assert result.evictions == 0


def by_the_rule(
    trace: RouteTrace, budget: int, victim: Callable[[list[Key], int, History], Key], protect: bool
) -> list[int]:
    """The replay rule as published: look up, insert, then evict until the budget holds."""
    resident: dict[Key, None] = {}
    history, misses = History(), []
    for index, batch in enumerate(trace.batches):
        keys = [(batch.layer, expert) for expert in batch.experts]
        misses.append(sum(key not in resident for key in keys))
        resident.update(dict.fromkeys(keys))
        history.use(keys)
        while sum(trace.expert_bytes[layer] for layer, _ in resident) > budget:
            candidates = [key for key in resident if not (protect and key in keys)]
            if not candidates:
                break
            del resident[victim(candidates, index, history)]
    return misses


class History:
    """How often, and when last, a key was used."""

    def __init__(self) -> None:
        self.count: Counter[Key] = Counter()
        self.last: dict[Key, int] = {}

    def use(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.count[key] += 1
            self.last[key] = sum(self.count.values())


@pytest.mark.parametrize("seed", range(20))
def test_lru_is_the_published_rule_at_every_budget(seed: int) -> None:
    """The engine's cache trims a batch's own excess at the next lookup, the rule at once."""
    trace = random_trace(seed, sizes=[10, 25, 10][: 1 + seed % 3], tokens=30)
    for budget in range(0, 150, 7):
        expected = {
            index: misses
            for part, share in by_size(trace, budget)
            for index, misses in zip(
                (i for i, b in enumerate(trace.batches) if b.layer in part.expert_bytes),
                by_the_rule(
                    part, share, lambda keys, _, history: min(keys, key=history.last.get), False
                ),
                strict=True,
            )
        }
        found = replay(trace, budget, Policy.LRU).misses_by_batch
        assert found == [expected[index] for index in range(len(trace.batches))]


def by_size(trace: RouteTrace, budget: int) -> list[tuple[RouteTrace, int]]:
    """The engine's cache gives layers whose experts are equally large a part of the budget."""
    sizes, parts = trace.expert_bytes, []
    for size in set(sizes.values()):
        of = {layer: size for layer, nbytes in sizes.items() if nbytes == size}
        batches = [batch for batch in trace.batches if batch.layer in of]
        parts.append((RouteTrace(of, batches), budget * sum(of.values()) // sum(sizes.values())))
    return parts


@pytest.mark.parametrize("seed", range(20))
def test_lfu_is_the_published_rule(seed: int) -> None:
    trace = random_trace(seed, sizes=[10, 25, 10], tokens=30)

    def least_used(keys: list[Key], _: int, history: History) -> Key:
        return min(keys, key=lambda key: (history.count[key], history.last[key]))

    for budget in range(100, 220, 7):  # the prompt's largest batch has 100 bytes
        expected = by_the_rule(trace, budget, least_used, True)
        assert replay(trace, budget, Policy.LFU).misses_by_batch == expected


def most_hits(trace: RouteTrace, budget: int) -> int:
    """The best that any policy can do: all choices of what to keep are tried.

    While a batch computes it is resident, and whatever else is must fit beside it; before the
    next batch the residents fit the budget.
    """
    bytes_of = trace.expert_bytes
    batches = [frozenset((b.layer, e) for e in b.experts) for b in trace.batches]

    def size(keys: frozenset[Key]) -> int:
        return sum(bytes_of[layer] for layer, _ in keys)

    def subsets(keys: frozenset[Key]) -> list[frozenset[Key]]:
        return [frozenset(c) for n in range(len(keys) + 1) for c in combinations(sorted(keys), n)]

    @lru_cache(None)
    def best(index: int, resident: frozenset[Key]) -> int:
        if index == len(batches):
            return 0
        batch = batches[index]
        beside = max(0, budget - size(batch))
        kept = [keys for keys in subsets(resident - batch) if size(keys) <= beside]
        after = {keys | own for keys in kept for own in subsets(batch)}
        later = max(best(index + 1, keys) for keys in after if size(keys) <= budget)
        return len(resident & batch) + later

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("budget", [10, 20, 30, 40])
def test_no_policy_beats_belady(seed: int, budget: int) -> None:
    """Sizes are equal; at 10 a batch of two is larger than the budget."""
    rng = random.Random(seed)
    layers = 1 + seed % 2
    tokens = [[rng.sample(range(4), 2) for _ in range(layers)] for _ in range(8 // layers)]
    trace = decode_trace(tokens, [10] * layers)
    hits = {policy: replay(trace, budget, policy).hits for policy in Policy}
    assert hits[Policy.BELADY] == most_hits(trace, budget)
    assert max(hits.values()) == hits[Policy.BELADY]


def test_random_evicts_each_entry_as_often() -> None:
    """Whether an entry was used much, is old or survived evictions makes no difference."""
    first: Counter[int] = Counter()
    third: Counter[int] = Counter()
    for seed in range(4000):
        cache = RandomCache(4, {0: 1}, seed)
        for expert in (0, 1, 2, 3, 0, 0, 0):
            cache.lookup(0, [expert])
        first[cache.lookup(0, [4]).victims[0][1]] += 1
        cache.lookup(0, [5])
        third[cache.lookup(0, [6]).victims[0][1]] += 1
    for expert in range(4):
        assert first[expert] == pytest.approx(1000, abs=150)  # five standard deviations
        assert third[expert] == pytest.approx(562, abs=110)  # survived two, then 1 in 4
    # 4 survived one eviction (3 in 4) before the third took it; 5 was protected until then.
    assert third[4] == pytest.approx(750, abs=125)
    assert third[5] == pytest.approx(1000, abs=150)


def test_random_is_repeatable() -> None:
    trace = random_trace(1, sizes=[10, 25], tokens=40)
    first, second = (replay(trace, 90, Policy.RANDOM) for _ in range(2))
    assert first == second


def test_replay_refuses_what_means_nothing() -> None:
    with pytest.raises(SettingsError, match="-1 bytes"):
        replay(one_by_one("ab"), -1, Policy.LRU)
    prompt = RouteTrace({0: 10}, [Batch("prefill", 0, 0, (1,))])
    with pytest.raises(TraceError, match="no decoded token"):
        replay(prompt, 10, Policy.LRU)


PUBLISHED = {  # decode hit rate in %, by cache size in MiB (BigMoeOnEdge, 2026-07-15)
    Policy.LRU: {500: 0.0, 1000: 37.7, 2000: 56.5, 4000: 80.3},
    Policy.LFU: {500: 26.6, 1000: 40.2, 2000: 58.6, 4000: 80.8},
    Policy.BELADY: {500: 45.3, 1000: 62.7, 2000: 79.4, 4000: 92.7},
}


@pytest.mark.skipif(
    "ROUTEAHEAD_TRACE" not in os.environ,
    reason="ROUTEAHEAD_TRACE is not set: the path of the published Qwen3-30B-A3B trace "
    "(BigMoeOnEdge, qwen.route.csv), whose hit rates are known",
)
@pytest.mark.parametrize("policy", PUBLISHED)
def test_published_hit_rates(policy: Policy) -> None:
    trace = read_trace(Path(os.environ["ROUTEAHEAD_TRACE"]))
    rates = {mb: 100 * replay(trace, mb * MIB, policy).hit_rate for mb in PUBLISHED[policy]}
    assert rates == pytest.approx(PUBLISHED[policy], abs=1.0)
