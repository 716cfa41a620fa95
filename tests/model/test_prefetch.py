"""Prefetchers and the probe change nothing but when bytes come; substitution keeps to its rule."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import models
from support.library import (
    PROMPTS,
    THREADS,
    Library,
    csv_rows,
    evaluate,
    token_batches,
    with_budget,
)
from support.readers import Delayed, Unruly, disk_error, interrupt
from support.router_reference import Forced, Routers

from routeahead import Llama, ReadError
from routeahead.experts.reader import Reader
from routeahead.experts.reads import Read
from routeahead.policies.prefetch import PredictedPrefetch
from routeahead.policies.probe import Probe
from routeahead.policies.substitute import Substitute
from routeahead.prediction.scores import (
    CONTROL,
    DEPTHS,
    HOTTEST,
    PREVIOUS,
    stale_gate,
)
from routeahead.routing.policy import Routing
from routeahead.telemetry.io_trace import read_io_trace, report
from routeahead.telemetry.recorder import Outputs

Load = Callable[..., Llama]


PREFETCHERS = {
    "temporal-3": {"prefetch": 3},
    "predicted": {"predict_prefetch": True},
    "predicted-all": {"predict_prefetch": True, "predict_spec_max": 99},
    "predicted-worker": {"predict_prefetch": True, "route_ahead_compute": "worker"},
}


@pytest.mark.parametrize("prefetcher", PREFETCHERS)
@pytest.mark.parametrize("name", models.FIXTURES)
def test_prefetchers_change_nothing(
    load: Load, library: Library, name: str, prefetcher: str
) -> None:
    """Tiny cache, delayed and reordered reads, an arena in which an unread page is a crash."""
    llm = with_budget(load, name, 0.05, poison=True, wrap_reader=Delayed, **PREFETCHERS[prefetcher])
    source = llm.source
    assert source
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    made = source.prefetch
    assert 0 < made.useful <= made.completed <= made.issued
    assert (
        made.landed <= made.completed
    )  # how many depends on the disk; told apart in test_early_reads
    assert source.lanes.early_bytes > 0 and source.cache.protected == 0


@pytest.mark.fast
@pytest.mark.parametrize("depth", [1, 3])
def test_the_cache_holds_what_it_would_without(load: Load, depth: int) -> None:
    """A guess evicts nothing: hits and misses are those of the plain stream."""
    counts = []
    for settings in ({}, {"prefetch": depth}):
        llm = with_budget(load, "qwen3moe", 0.15, **settings)
        for batches in PROMPTS:
            evaluate(llm, batches)
        assert llm.source
        counts.append((llm.source.cache.hits, llm.source.cache.misses))
    assert counts[0] == counts[1]


def test_only_protecting_reads_nothing_early(load: Load, library: Library) -> None:
    llm = with_budget(load, "olmoe", 0.15, predict_prefetch=True, predict_spec_max=0)
    for batches, expected in zip(PROMPTS, library.resident("olmoe"), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    assert llm.source and llm.source.prefetch.issued == 0 == llm.source.lanes.early_bytes
    predicted = llm.policies.find(PredictedPrefetch)
    assert predicted and predicted.slots > 0


def test_a_demand_load_cancels_guesses(load: Load, tmp_path: Path) -> None:
    """One slow lane: many guesses are taken back before it comes to them; none is read twice."""
    path = tmp_path / "io.csv"
    llm = with_budget(
        load, "olmoe", 0.05, io_threads=1, prefetch=3, wrap_reader=Delayed,
        outputs=Outputs(io_trace=path),
    )  # fmt: skip
    evaluate(llm, token_batches(2, decode=30))
    source = llm.source
    assert source and source.prefetch.completed < source.prefetch.issued
    llm.close()
    figures = report(read_io_trace(path))
    assert figures.kinds["speculative"] > 0
    assert figures.kinds["speculative"] < 3 * source.prefetch.issued
    assert figures.early_again == 0


def test_reads_of_a_guess_are_counted_where_they_end(load: Load, tmp_path: Path) -> None:
    """Some outlive their batch: trace and counters put them with the next one."""
    path = tmp_path / "io.csv"
    llm = with_budget(
        load, "olmoe", 0.05, io_threads=1, prefetch=3, wrap_reader=Delayed,
        outputs=Outputs(io_trace=path),
    )  # fmt: skip
    for batches in PROMPTS:
        evaluate(llm, batches)
    prefill, decode = llm.counters.prefill, llm.counters.decode
    llm.close()
    figures = report(read_io_trace(path))
    assert figures.reads == prefill.reads + decode.reads
    assert figures.decode_bytes == decode.bytes_read


def test_guesses_are_limited_and_are_served_last(load: Load) -> None:
    """Two of four absent experts are read; what a layer waits for overtakes them."""
    order: list[int] = []

    class Noting:
        def __init__(self, inner: Reader) -> None:
            self._inner = inner
            self.hold = threading.Lock()

        def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
            order.append(offset)
            with self.hold:
                return self._inner.read(shard, offset, view, need)

        def close(self) -> None:
            self._inner.close()

    made: list[Noting] = []

    def wrap(inner: Reader) -> Reader:
        made.append(Noting(inner))
        return made[0]

    llm = with_budget(load, "qwen3moe", 0.3, io_threads=1, wrap_reader=wrap)
    source = llm.source
    assert source
    order.clear()
    made[0].hold.acquire()
    source.guess(3, [1, 2, 3, 4], limit=2)
    while not order:  # the lane is inside of the first read
        time.sleep(0.001)
    load_ = source.require(2, [5])
    assert load_
    made[0].hold.release()
    source.wait(load_)
    tensors = {t.offset: t for t in llm.layout.experts}
    layers = [max(o for o in tensors if o <= at + 4096) for at in order]
    assert [tensors[o].layer for o in layers] == [3, 2, 2, 2]  # the others were taken back
    assert source.prefetch.issued == 2


@pytest.mark.parametrize("prefetcher", PREFETCHERS)
def test_a_failing_guess(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch, prefetcher: str
) -> None:
    """Guesses alone fail: one that is used is an error, one that is not is nothing."""
    llm = with_budget(load, "qwen3moe", 0.1, poison=True, **PREFETCHERS[prefetcher])
    source, rng, failed = llm.source, random.Random(0), 0
    assert source
    run = source.lanes._run

    def sometimes_fail(lane: int, read: Read) -> None:
        if read.kind == "speculative" and rng.random() < 0.1:
            source.lanes._settle(read, ReadError("guessed and failed"))
        else:
            run(lane, read)

    monkeypatch.setattr(source.lanes, "_run", sometimes_fail)
    for _ in range(8):
        for batches, expected in zip(PROMPTS, library.resident("qwen3moe"), strict=True):
            try:
                np.testing.assert_array_equal(evaluate(llm, batches), expected)
            except ReadError:
                failed += 1
    assert failed > 0
    monkeypatch.undo()
    for batches, expected in zip(PROMPTS, library.resident("qwen3moe"), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("prefetcher", ["temporal-3", "predicted-all"])
def test_cut_off_anywhere(load: Load, library: Library, prefetcher: str, poison: bool) -> None:
    """Prompts back to back under delays, some of them cut off by a fault or a signal among demand
    reads and guesses: what comes to its end is right."""
    made: list[Unruly] = []

    def wrap(inner: Reader) -> Reader:
        made.append(Unruly(inner))
        return made[0]

    llm = with_budget(
        load, "qwen3moe", 0.1, wrap_reader=wrap, poison=poison, **PREFETCHERS[prefetcher]
    )
    rng, cut = random.Random(5), 0
    for schedule in range(20):
        made[0].schedule(schedule)
        which = rng.randrange(2)
        if rng.random() < 0.5:
            made[0].strike(rng.randrange(1, 120), disk_error if poison else interrupt)
        try:
            logits = evaluate(llm, PROMPTS[which])
        except (ReadError, KeyboardInterrupt):
            cut += 1
        else:
            np.testing.assert_array_equal(logits, library.resident("qwen3moe")[which])
        made[0].strike(0, disk_error)
    assert cut > 3


@pytest.mark.parametrize("prefetcher", ["temporal-3", "predicted-all"])
def test_nothing_grows_over_many_generations(load: Load, prefetcher: str) -> None:
    """Slots of guesses that were thrown away are used again."""
    llm = with_budget(load, "qwen3moe", 0.25, **PREFETCHERS[prefetcher])
    source, rng = llm.source, random.Random(1)
    assert source
    taken = []
    for generation in range(100):
        batches = token_batches(generation, prompt=3, decode=4)
        evaluate(llm, batches[: rng.randrange(1, 6)])
        taken.append(sum(pool.count for pool, _ in source.table.pools))
    assert taken[-1] - taken[50] < llm.layout.n_expert_used * len(llm.layout.moe_layers)


@pytest.mark.parametrize("name", models.FIXTURES)
def test_the_probe_reproduces_every_routing(load: Load, library: Library, name: str) -> None:
    llm = load(name, cache_mb=8, predict_log=True)
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    found = llm.policies.find(Probe)
    assert found
    probe, layers = found.scores, llm.layout.moe_layers
    tokens = sum(len(batches) - 1 for batches in PROMPTS)
    assert probe.sound
    for layer in layers:
        control = probe.scores[CONTROL][layer]
        assert control.routings == control.whole == tokens
        assert control.found == control.slots == tokens * llm.layout.n_expert_used
    for depth in DEPTHS:
        scores = probe.scores[stale_gate(depth)]
        for index, layer in enumerate(layers):
            expected_routings = tokens if index >= depth else 0
            assert scores[layer].routings == expected_routings
            assert (scores[layer].overlap is None) == (expected_routings == 0)
        assert probe.total(stale_gate(depth)).whole < (len(layers) - depth) * tokens
    assert probe.total(PREVIOUS).slots > 0 and probe.total(HOTTEST).slots > 0


# --- substitution ---


@pytest.mark.parametrize("name", models.FIXTURES)
def test_an_inert_margin_changes_nothing(load: Load, library: Library, name: str) -> None:
    llm = with_budget(load, name, 0.15, expert_substitute=1e-9, poison=True)
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    policy = llm.policies.find(Substitute)
    assert policy and policy.substituted == 0


@pytest.mark.parametrize("name", models.FIXTURES)
def test_substitution_is_the_references(
    load: Load, library: Library, tmp_path: Path, name: str
) -> None:
    """The recorded routings are those that a resident model's hidden states, the architecture's
    rule and the recorded residency give; and the logits are those of the routing."""
    path, margin, slack = tmp_path / "route.csv", 0.1, 2e-5
    llm = with_budget(
        load, name, 0.3, expert_substitute=margin, poison=True, outputs=Outputs(route_trace=path)
    )
    held: dict[tuple[int, int], set[int]] = {}
    source, policy = llm.source, llm.policies.find(Substitute)
    assert source and policy
    routed = policy.routed

    def note_and_choose(routing: Routing) -> None:
        if routing.phase == "decode":
            position = int(routing.positions[0])
            experts = range(llm.layout.n_expert)
            held[position, routing.layer] = {
                e for e in experts if (routing.layer, e) in source.cache
            }
        routed(routing)

    policy.routed = note_and_choose  # type: ignore[method-assign]
    logits = evaluate(llm, PROMPTS[0])
    seen = policy.substituted
    llm.close()
    ids: dict[tuple[int, int], list[int]] = {}
    own: dict[tuple[int, int], list[int]] = {}
    for row in csv_rows(path):
        if row["phase"] == "1":
            key = (int(row["step"]), int(row["layer"]))
            ids.setdefault(key, []).append(int(row["expert"]))
            own.setdefault(key, []).append(int(row["router_expert"]))
    recorded = {key: np.array(slots, np.int32) for key, slots in ids.items()}
    forced = Forced(library.path(name), recorded, threads=THREADS)
    np.testing.assert_array_equal(forced.evaluate(PROMPTS[0]), logits)
    forced.close()
    routers, changed = Routers(library.path(name), models.FIXTURES[name]), 0
    for key, slots in recorded.items():
        assert forced.chosen[key].tolist() == own[key]
        changed += len(set(slots.tolist()) - set(own[key]))
        scores = routers.selection_scores(key[1], forced.inputs[key])
        finite = scores[np.isfinite(scores)]
        raised = scores.copy()
        raised[list(held[key])] += margin * (finite.max() - finite.min())
        outside = np.delete(raised, slots)
        assert raised[slots].min() >= outside.max() - slack, key
    assert changed == seen > 0


def test_prefetching_beside_a_policy_that_looks_at_the_cache_warns(load: Load) -> None:
    with pytest.warns(UserWarning, match="a prefetcher changes that"):
        with_budget(load, "qwen3moe", 0.2, expert_substitute=0.1, prefetch=1)


def test_a_guess_that_was_read_in_vain_makes_the_next_read_a_re_read(load: Load) -> None:
    llm = with_budget(load, "qwen3moe", 0.5, io_threads=1)
    source = llm.source
    assert source
    source.begin()

    def use(expert: int) -> None:
        demand = source.require(3, [expert])
        if demand:
            source.wait(demand)

    def guess(expert: int) -> None:
        source.guess(3, [expert])
        known = source._guesses.get(3, expert)
        assert known
        while not known.landed:
            time.sleep(0.001)

    guess(1)
    use(1)  # as if it had been read on demand
    assert source.cache.rereads == 0 and source.prefetch.landed == 1
    guess(2)
    use(1)
    assert source.cache.rereads == 0 and (3, 2) not in source.cache
    use(2)
    assert source.cache.rereads == 1
