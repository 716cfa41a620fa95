"""Eviction by expected use, against a transcription of its rule in plain Python."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.traces import random_trace

from routeahead.experts.cache import ExpertCache
from routeahead.experts.eviction import eviction
from routeahead.experts.layout import MIB
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import replay
from routeahead.telemetry.route_trace import Batch, RouteTrace, TraceError, read_trace
from routeahead.types import CachePolicy

QWEN = Path(__file__).parents[1] / "data" / "routing" / "qwen3-30b-a3b.csv"

HALF_LIVES, SHARES = (0.7, 5.0, 40.0), (0.77, 0.21, 0.08)


class Rule:
    """The rule, one number at a time: D, C, n and the priority of each layer's experts."""

    def __init__(self, layers: Sequence[int], n_expert: int) -> None:
        self.experts, self.layers, self.visits = range(n_expert), layers, 0
        self.sums = {(layer, e): [0.0] * 3 for layer in layers for e in self.experts}
        self.pairs: dict[tuple[int, int, int], int] = {}
        self.followed: dict[tuple[int, int], int] = {}
        self.before: dict[int, Sequence[int]] = {layer: () for layer in layers}
        self.priority: dict[tuple[int, int], float] = {}

    def visit(self, layer: int, rows: Sequence[Sequence[int]]) -> None:
        self.visits += 1
        for e in self.experts:
            sums, uses = self.sums[layer, e], sum(e in row for row in rows)
            for i in range(3):
                sums[i] *= 2 ** (-1 / HALF_LIVES[i])
                if uses:
                    sums[i] += SHARES[i] * (1 if len(rows) == 1 else 0.25 * math.log(1 + uses))
        for row in rows:
            for f in self.before[layer]:
                self.followed[layer, f] = self.followed.get((layer, f), 0) + 1
                for e in row:
                    self.pairs[layer, f, e] = self.pairs.get((layer, f, e), 0) + 1
            self.before[layer] = row
        for e in self.experts:
            score, before = sum(self.sums[layer, e]), self.before[layer]
            for f in before:
                weight = 2.0 / (len(before) * (self.followed.get((layer, f), 0) + 2))
                score += weight * self.pairs.get((layer, f, e), 0)
            position = self.visits / len(self.layers)
            self.priority[layer, e] = 1 / (score + 0.02) + position


def by_the_rule(trace: RouteTrace, budget: int) -> list[int]:
    """Misses of each batch, with one budget for all layers."""
    sizes = trace.expert_bytes
    rule = Rule(list(sizes), 1 + max(e for batch in trace.batches for e in batch.experts))
    here: set[tuple[int, int]] = set()
    misses, used = [], 0

    def evict(most: int, keep: Sequence[tuple[int, int]]) -> None:
        nonlocal used
        while used > most and (free := here.difference(keep)):
            victim = min(free, key=lambda key: (-rule.priority[key], key))
            here.remove(victim)
            used -= sizes[victim[0]]

    for batch in trace.batches:
        if batch.rows is None:  # a token begins within the budget
            evict(budget, ())
        rule.visit(batch.layer, [batch.experts] if batch.rows is None else batch.rows.tolist())
        keys = [(batch.layer, e) for e in batch.experts]
        absent = [key for key in keys if key not in here]
        misses.append(len(absent))
        here.update(absent)
        read = sizes[batch.layer] * len(absent)
        beside = read if batch.rows is not None else 0  # until the next batch
        used += read
        evict(budget + beside, keys)
    return misses


def prompts_and_tokens(seed: int, n_expert: int = 9) -> RouteTrace:
    """Three layers, experts of unequal popularity, prompts of several rows between the tokens."""
    rng = random.Random(seed)
    batches = []
    for step in range(40):
        rows = rng.choice([1, 1, 1, 1, 2, 7])
        for layer in range(3):
            ids = np.array(
                [
                    sorted(range(n_expert), key=lambda e: rng.random() ** (1 + e))[:2]
                    for _ in range(rows)
                ],
                np.int32,
            )
            experts = tuple(dict.fromkeys(ids.ravel().tolist()))
            phase = "decode" if rows == 1 else "prefill"
            batches.append(Batch(phase, step, layer, experts, None if rows == 1 else ids))
    return RouteTrace(dict.fromkeys(range(3), 10), batches)


@pytest.mark.parametrize("seed", range(8))
def test_decay_is_the_rule_at_every_budget(seed: int) -> None:
    trace = prompts_and_tokens(seed)
    for budget in range(100, 280, 30):  # the largest batch has at most 90 bytes
        assert replay(trace, budget, Policy.DECAY).misses_by_batch == by_the_rule(trace, budget)


def one_budget(trace: RouteTrace, budget: int, policy: CachePolicy) -> list[int]:
    """Misses of each batch; the engine's cache would divide the budget by the size of experts."""
    n_expert = 1 + max(max(batch.experts) for batch in trace.batches)
    entries, used = eviction(policy, n_expert)(trace.expert_bytes), 0
    misses = []
    for batch in trace.batches:
        if batch.rows is None and used > budget:
            used -= sum(trace.expert_bytes[layer] for layer, _ in entries.evict(used - budget))
        room, spare = budget - used, 0 if batch.rows is None else 1 << 40
        absent, gone = entries.use(batch.layer, batch.experts, batch.rows, room, spare)
        misses.append(len(absent))
        used += trace.expert_bytes[batch.layer] * len(absent)
        used -= sum(trace.expert_bytes[layer] for layer, _ in gone)
    return misses


def test_decay_is_the_rule_on_a_recorded_routing() -> None:
    """Layers of two sizes, a prompt of 28 rows, 64 tokens of Qwen3-30B-A3B."""
    trace = read_trace(QWEN)
    assert trace.batches[0].rows is not None and trace.batches[0].rows.shape == (28, 6)
    for mib in (240, 400, 700):
        assert one_budget(trace, mib * MIB, "decay") == by_the_rule(trace, mib * MIB)


def test_decay_hits_more_than_lru_on_a_recorded_routing() -> None:
    """The rule's own figures, fixed: whoever changes a constant sees what it did."""
    trace = read_trace(QWEN)
    found = {
        policy: [replay(trace, mib * MIB, policy).hits for mib in (100, 200, 400)]
        for policy in (Policy.LRU, Policy.DECAY, Policy.BELADY)
    }
    assert found == {
        Policy.LRU: [371, 628, 1003],
        Policy.DECAY: [470, 743, 1070],
        Policy.BELADY: [766, 1056, 1311],
    }


def cached_hits(trace: RouteTrace, misses: Sequence[int]) -> float:
    """Decode hit rate in percent."""
    decode = [(len(b.experts), m) for b, m in zip(trace.batches, misses, strict=True)
              if b.phase == "decode"]  # fmt: skip
    return 100 - 100 * sum(m for _, m in decode) / sum(n for n, _ in decode)


@pytest.mark.skipif(
    "ROUTEAHEAD_TRACE" not in os.environ,
    reason="ROUTEAHEAD_TRACE is not set: the path of the published Qwen3-30B-A3B trace "
    "(BigMoeOnEdge, qwen.route.csv), whose hit rates are known",
)
def test_hit_rates_of_the_study() -> None:
    """With one budget for all layers those of the study; with the engine's parts as many."""
    trace = read_trace(Path(os.environ["ROUTEAHEAD_TRACE"]))
    study = {1000: 45.8, 2000: 65.6, 4000: 84.2}
    for mib, rate in study.items():
        whole = one_budget(trace, mib * MIB, "decay")
        assert cached_hits(trace, whole) == pytest.approx(rate, abs=0.05)
        parts = replay(trace, mib * MIB, Policy.DECAY).hit_rate
        assert 100 * parts == pytest.approx(rate, abs=0.3)


def test_of_a_scan_a_part_stays() -> None:
    """Ubatches that each use every expert: LRU has always just evicted what comes next."""
    rows = np.array([[e, (e + 1) % 8] for e in range(8)], np.int32)
    batches = [Batch("prefill", 8 * u, layer, tuple(range(8)), rows)
               for u in range(6) for layer in range(4)]  # fmt: skip
    trace = RouteTrace(dict.fromkeys(range(4), 10), [*batches, Batch("decode", 48, 0, (0, 1))])
    budget = 160  # half of the experts
    misses = {p: replay(trace, budget, p).misses_by_batch[:-1] for p in (Policy.LRU, Policy.DECAY)}
    assert sum(misses[Policy.LRU]) == 6 * 32
    # The layer that computes stands beside the 16 that stay.
    assert sum(misses[Policy.DECAY]) == 32 + 5 * (32 - 16)


def test_decay_refuses_experts_that_no_model_has() -> None:
    trace = RouteTrace({0: 1}, [Batch("decode", 0, 0, (10**9,))])
    assert replay(trace, 1, Policy.LRU).misses == 1
    with pytest.raises(TraceError, match="expert 1000000000: decay takes layers of up to 4096"):
        replay(trace, 1, Policy.DECAY)


def test_counts_of_successors_are_halved_before_they_overflow() -> None:
    """One expert follows another for more rows than 16 bits count; then a third does."""
    entries: Any = eviction("decay", 3)({0: 1})
    for follower, times in ((1, 70_000), (2, 3_000)):
        rows = np.array([[0], [follower]] * times, np.int32)
        entries.use(0, [0, follower], rows, 2)
    _, before, now, followed = entries._successors[0, 0].tolist()
    assert followed == before + now <= 4096
    assert now > before > 0


@pytest.mark.parametrize("policy", ["lru", "decay"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_computed_with_or_protected_stays(policy: CachePolicy, seed: int) -> None:
    """Lookups, early admissions, protections and resizes in any order, on layers of two sizes."""
    rng = random.Random(seed)
    sizes = {layer: 10 + 15 * (layer % 2) for layer in range(6)}
    cache = ExpertCache(1200, sizes, eviction(policy, 12))
    here: set[tuple[int, int]] = set()
    early: dict[int, set[int]] = {}

    def check(victims: Sequence[tuple[int, int]]) -> None:
        assert here >= set(victims) and len(set(victims)) == len(victims)
        here.difference_update(victims)
        assert len(cache) == len(here) and all(key in cache for key in here)
        assert cache.used == sum(sizes[layer] for layer, _ in here)

    for token in range(60):
        for layer in sizes:
            count = rng.choice([2, 2, 2, 7])
            experts = rng.sample(range(12), count)
            rows = np.array(list(pairwise(experts)), np.int32) if count > 2 else None
            absent = [e for e in experts if (layer, e) not in here]
            early.pop(layer - 1, None)
            outcome = cache.lookup(layer, experts, rows)
            assert outcome.misses == absent
            here |= {(layer, e) for e in experts}
            kept = {(layer, e) for e in experts} | {(at, e) for at in early for e in early[at]}
            assert not kept.intersection(outcome.victims)
            check(outcome.victims)
            if rng.random() < 0.4 and layer + 2 in sizes:
                wanted = rng.sample(range(12), 2)
                here |= {(layer + 2, e) for e in cache.admit_early(layer + 2, wanted)}
                early[layer + 2] = set(wanted)
        cache.release()
        early.clear()
        if token % 20 == 19:
            check(cache.resize(rng.choice([300, 700, 1200])))
            assert cache.used <= cache.budget
    assert cache.evictions > 100


def test_a_lookup_is_one_call_of_machine_code() -> None:
    """Also one that evicts: each call fetches its code and what it is given from memory."""
    cache, rng = (
        ExpertCache(40, dict.fromkeys(range(4), 1), eviction("decay", 16)),
        random.Random(1),
    )
    entries: Any = cache._parts[0].entries
    calls: list[str] = []

    def counted(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*given: int) -> None:
            calls.append(name)
            function(*given)

        return call

    for name in ("_used", "_evicted"):
        setattr(entries, name, counted(name, getattr(entries, name)))
    for layer in [*range(4)] * 30:
        cache.lookup(layer, rng.sample(range(16), 3))
    assert cache.evictions > 50
    assert calls == ["_used"] * 120


@pytest.mark.parametrize("seed", range(4))
def test_a_cache_that_holds_all_never_evicts(seed: int) -> None:
    trace = random_trace(seed, sizes=[10, 25, 10], tokens=50)
    assert replay(trace, 6 * 45, Policy.DECAY).evictions == 0
