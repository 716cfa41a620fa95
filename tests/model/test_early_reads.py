"""Reading early changes when bytes come, and nothing else: the same logits, the same bytes read."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.library import Library, csv_rows, evaluate, token_batches, with_budget
from support.pairwise import daily_pairs
from support.readers import Failing, Unruly, disk_error, interrupt

from routeahead import Llama, ReadError
from routeahead.experts.reader import Reader
from routeahead.experts.source import ExpertSource
from routeahead.policies.route_ahead import RouteAhead
from routeahead.telemetry.io_trace import read_io_trace, report
from routeahead.telemetry.recorder import Outputs

Load = Callable[..., Llama]
Logits = npt.NDArray[np.float32]


@pytest.mark.parametrize(
    ("name", "depth", "overlap"),
    daily_pairs(name=["qwen3moe", "olmoe", "gemma4"], depth=[1, 2, 4], overlap=[True, False]),
)
def test_same_bytes_as_without(
    load: Load, tmp_path: Path, name: str, depth: int, overlap: bool
) -> None:
    """Forced to the routing that was committed, without early reads: the same logits, and the same
    bytes within 1 %."""
    batches = token_batches(3, decode=110)
    trace, early, plain = tmp_path / "route.csv", tmp_path / "early.csv", tmp_path / "plain.csv"
    runs = [
        {"route_ahead": depth, "outputs": Outputs(route_trace=trace, io_trace=early)},
        {"replay_routing": trace, "outputs": Outputs(io_trace=plain)},
    ]
    logits, sources = [], []
    for settings in runs:
        llm = with_budget(load, name, 0.25, overlap=overlap, poison=True, **settings)
        logits.append(evaluate(llm, batches))
        sources.append(llm.source)
        llm.close()
    np.testing.assert_array_equal(logits[0], logits[1])
    ahead, without = sources
    assert ahead.prefetch.issued == ahead.prefetch.useful > 0
    assert ahead.prefetch.landed <= ahead.prefetch.completed <= ahead.prefetch.issued
    assert ahead.cache.evictions > 0 and ahead.cache.protected == 0
    figures, reference = report(read_io_trace(early)), report(read_io_trace(plain))
    assert figures.decode_bytes == pytest.approx(reference.decode_bytes, rel=0.01)
    assert figures.early_again == 0
    projections = figures.kinds["committed"] / ahead.prefetch.issued
    assert projections == len({t.projection for t in llm.layout.experts})
    assert ahead.lanes.early_bytes > 0 and without.lanes.early_bytes == 0
    assert ahead.cache.hits + ahead.cache.misses == without.cache.hits + without.cache.misses


def test_trace_of_a_run_that_reads_early_tells_what_was_read(load: Load, tmp_path: Path) -> None:
    """An expert that was read early was absent, and its bytes are charged to its own routing."""
    path = tmp_path / "route.csv"
    llm = with_budget(load, "qwen3moe", 0.25, route_ahead=2, outputs=Outputs(route_trace=path))
    evaluate(llm, token_batches(4))
    misses = llm.counters.decode.misses
    llm.close()
    rows = csv_rows(path)
    assert sum(r["phase"] == "1" and r["residency"] == "0" for r in rows) == misses > 0


def test_early_reads_are_begun_in_the_order_promised(load: Load, tmp_path: Path) -> None:
    """Layer by layer, and in a layer what it computes with first, best experts first: as long as
    one lane reads, that is the order in which reads begin."""
    io, trace = tmp_path / "io.csv", tmp_path / "route.csv"
    llm = with_budget(
        load, "qwen3moe", 0.25, route_ahead=2, io_threads=1,
        outputs=Outputs(io_trace=io, route_trace=trace),
    )  # fmt: skip
    evaluate(llm, token_batches(4))
    assert llm.streamed
    order = llm.streamed.stream._order
    llm.close()
    rank = {
        (row["step"], row["layer"], row["expert"]): int(row["slot"])
        for row in csv_rows(trace)
        if row["phase"] == "1"
    }
    rows = [row for row in csv_rows(io) if row["phase"] == "decode" and row["kind"] == "committed"]
    rows.sort(key=lambda row: float(row["time_s"]) - float(row["latency_s"]))
    places = [
        (
            int(row["step"]),
            int(row["layer"]),
            order.index(row["projection"]),
            rank[row["step"], row["layer"], row["expert"]],
        )
        for row in rows
    ]
    assert places == sorted(places) and len(places) > 100
    assert len(order) == 3 and len({place[3] for place in places}) == llm.layout.n_expert_used


class Gated:
    """Reads only while it is open."""

    def __init__(self, inner: Reader) -> None:
        self._inner, self.open = inner, threading.Event()
        self.open.set()

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        self.open.wait()
        return self._inner.read(shard, offset, view, need)

    def close(self) -> None:
        self._inner.close()


def emptied(load: Load, gate: type[Gated], *, lanes: int) -> tuple[ExpertSource, Gated]:
    """A model's source, whose cache has nothing, and the open gate before its disk."""
    gates: list[Gated] = []

    def gated(inner: Reader) -> Reader:
        gates.append(gate(inner))
        return gates[0]

    llm = with_budget(load, "qwen3moe", 0.5, io_threads=lanes, wrap_reader=gated)
    evaluate(llm, token_batches(4)[:2])
    source = llm.source
    assert source
    source.cache.budget = source.cache.budget  # empty
    source.begin()
    return source, gates[0]


def test_issued_begun_and_landed_in_time_are_told_apart(load: Load) -> None:
    """One lane, which hangs in the first of an expert's reads until the layer comes."""
    source, gate = emptied(load, Gated, lanes=1)
    before, read = source.lanes.early_bytes, source.lanes.bytes_read
    gate.open.clear()
    source.read_early(3, [1, 2, 5])
    while source.lanes._queues["committed"] and len(source.lanes._queues["committed"]) > 8:
        time.sleep(0.001)
    made = source.prefetch
    assert (made.issued, made.completed, made.landed) == (3, 0, 0)
    threading.Timer(0.05, gate.open.set).start()
    demand = source.require(3, [1, 2, 5])
    assert demand
    assert (made.issued, made.completed, made.landed, made.useful) == (3, 1, 0, 3)
    source.wait(demand)
    early, whole = source.lanes.early_bytes - before, source.lanes.bytes_read - read
    assert 0 < 5 * early <= whole  # one read of nine, each of whole blocks

    source.read_early(4, [1, 2])
    while not source._early[4].done():
        time.sleep(0.001)
    assert source.require(4, [1, 2]) is None
    assert (made.issued, made.completed, made.landed, made.useful) == (5, 3, 2, 5)
    source.cache.release()


class FirstHangs(Gated):
    """Of the reads after `open` was cleared, one hangs until it is set."""

    def __init__(self, inner: Reader) -> None:
        super().__init__(inner)
        self._hangs = [True]

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        if not self.open.is_set():
            with contextlib.suppress(IndexError):
                self._hangs.pop()
                self.open.wait()
        return self._inner.read(shard, offset, view, need)


def test_a_layer_waits_for_what_was_read_early_for_it_at_two_times(load: Load) -> None:
    """By two policies, say: the second one's reads are there, and one of the first's is not."""
    source, gate = emptied(load, FirstHangs, lanes=2)
    gate.open.clear()
    source.read_early(3, [1])
    source.read_early(3, [1, 2])
    second = source._early[3].tickets.values()
    while not all(ticket.done for ticket in second):
        time.sleep(0.001)
    assert source.cache.protected == 2 and source.prefetch.issued == 2
    load_of_both = source.require(3, [1, 2])
    assert load_of_both and not load_of_both.done()
    gate.open.set()
    source.wait(load_of_both)
    assert (source.prefetch.completed, source.prefetch.landed, source.prefetch.useful) == (2, 1, 2)
    source.cache.release()


# --- randomised schedules ---


SCHEDULED = ["qwen3moe", "gpt-oss", "gemma4"]
PROMPTS = [token_batches(11, prompt=9, decode=7), token_batches(12, prompt=1, decode=6)]


class Serial:
    """Logits of serial runs, forced to the routing that route-ahead committed, reading nothing
    early: what every schedule must give."""

    def __init__(self, load: Load, folder: Path) -> None:
        self._load, self._folder = load, folder
        self._known: dict[tuple[str, int], list[Logits]] = {}

    def logits(self, name: str, depth: int) -> list[Logits]:
        if (name, depth) not in self._known:
            self._known[name, depth] = [self._forced(name, depth, batches) for batches in PROMPTS]
        return self._known[name, depth]

    def _forced(self, name: str, depth: int, batches: list[list[int]]) -> Logits:
        trace = self._folder / f"{name}-{depth}-{len(batches)}.csv"
        llm = self._load(name, cache_mb=0, route_ahead=depth, outputs=Outputs(route_trace=trace))
        evaluate(llm, batches)
        llm.close()
        llm = self._load(name, cache_mb=0, overlap=False, io_threads=1, replay_routing=trace)
        logits = evaluate(llm, batches)
        llm.close()
        return logits


def run_schedules(load: Load, folder: Path, models: int, each: int) -> None:
    """`models` loads, and on each of them `each` schedules: prompts back to back under random
    delays and cache sizes, some cut off in the middle of a token or between two."""
    serial, rng, cut = Serial(load, folder), random.Random(models), [0, 0]
    issued = useful = 0
    for number in range(models):
        name, depth = SCHEDULED[number % 3], rng.choice([1, 2, 3])
        made: list[Unruly] = []

        def unruly(inner: Reader, made: list[Unruly] = made) -> Reader:
            made.append(Unruly(inner))
            return made[0]

        llm = load(
            name,
            cache_mb=0,
            io_threads=rng.choice([1, 2, 4]),
            overlap=rng.random() < 0.7,
            route_ahead=depth,
            route_ahead_compute=rng.choice(["inline", "worker"]),
            wrap_reader=unruly,
            poison=(poison := number % 4 != 3),
        )
        faults = [disk_error] if poison else [disk_error, interrupt]
        source = llm.source
        assert source
        for schedule in range(each):
            made[0].schedule(schedule)
            least = llm.layout.token_bytes()
            source.cache.budget = rng.choice([least // 2, least, 2 * least])
            which = rng.randrange(2)
            batches, kind = PROMPTS[which], rng.random()
            if kind < 0.25:  # cancelled between two tokens
                evaluate(llm, batches[: rng.randrange(2, 5)])
            elif kind < 0.5:  # cut off inside of one
                made[0].strike(rng.randrange(1, 90), rng.choice(faults))
                struck = False
                try:
                    try:
                        evaluate(llm, batches)
                    except ReadError:
                        struck = True
                    source.lanes.drain()  # the signal of a read that nobody waits for comes here
                except KeyboardInterrupt:
                    struck = True
                cut[1] += struck
                made[0].strike(0, disk_error)
                cut[0] += 1
                assert source.cache.protected == 0 and not source._early
            else:
                logits = evaluate(llm, batches)
                np.testing.assert_array_equal(logits, serial.logits(name, depth)[which])
                assert source.cache.protected == 0 and not source._early
        logits = evaluate(llm, PROMPTS[0])
        np.testing.assert_array_equal(logits, serial.logits(name, depth)[0])
        issued, useful = issued + source.prefetch.issued, useful + source.prefetch.useful
        llm.close()
    assert cut[1] > 0.5 * cut[0] > 0
    assert useful >= 0.97 * issued > 0


def test_randomised_schedules(load: Load, tmp_path: Path) -> None:
    run_schedules(load, tmp_path, models=6, each=18)  # 108


@pytest.mark.slow
def test_a_thousand_randomised_schedules(load: Load, tmp_path: Path) -> None:
    run_schedules(load, tmp_path, models=50, each=20)


# --- faults ---


@pytest.mark.parametrize("fault", [disk_error, interrupt])
@pytest.mark.parametrize("compute", ["inline", "worker"])
def test_fault_among_early_reads(
    load: Load, library: Library, compute: str, fault: Callable[[], int]
) -> None:
    """A committed read fails: no protection stays, and the next prompt is right."""
    made: list[Failing] = []

    def wrap(inner: Reader) -> Reader:
        made.append(Failing(inner, lambda count: count == 25, fault))
        return made[0]

    llm = with_budget(
        load, "qwen3moe", 0.2, route_ahead=2, route_ahead_compute=compute, wrap_reader=wrap
    )
    batches = token_batches(6)
    expected = evaluate(llm, batches)
    assert llm.source and llm.source.prefetch.issued > 0
    llm.source.recover()  # all is absent again, so that the fault finds reads to strike
    llm.reset()
    llm.phase = "prefill"
    llm.eval(batches[0])
    made[0].armed = True
    llm.phase = "decode"
    with pytest.raises((ReadError, KeyboardInterrupt)):
        for batch in batches[1:]:
            llm.eval(batch)
    made[0].armed = False
    assert llm.source.cache.protected == 0 and len(llm.source.cache) == 0
    np.testing.assert_array_equal(evaluate(llm, batches), expected)


@pytest.mark.parametrize("compute", ["inline", "worker"])
@pytest.mark.parametrize("call", ["settle", "predict", "_rank"])
def test_fault_inside_of_route_ahead(
    load: Load, monkeypatch: pytest.MonkeyPatch, compute: str, call: str
) -> None:
    llm = with_budget(load, "qwen3moe", 0.2, route_ahead=2, route_ahead_compute=compute)
    batches, policy = token_batches(7), llm.policies.find(RouteAhead)
    assert policy
    predictions = policy.predictions
    expected = evaluate(llm, batches)
    original, calls = getattr(predictions, call), 0

    def faulty(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise MemoryError
        return original(*arguments)

    monkeypatch.setattr(predictions, call, faulty)
    with pytest.raises(MemoryError):
        evaluate(llm, batches)
    monkeypatch.undo()
    assert llm.source and llm.source.cache.protected == 0
    np.testing.assert_array_equal(evaluate(llm, batches), expected)


def test_nothing_grows_over_many_generations(load: Load) -> None:
    """Early reads take free slots, not always new ones."""
    llm = with_budget(load, "qwen3moe", 0.25, route_ahead=2)
    source, rng = llm.source, random.Random(1)
    policy = llm.policies.find(RouteAhead)
    assert source and policy
    taken = []
    for generation in range(150):
        batches = token_batches(generation, prompt=3, decode=4)
        evaluate(llm, batches[: rng.randrange(1, 6)])
        assert source.cache.protected == 0 and not source._early
        assert not policy.predictions._fresh
        taken.append(sum(pool.count for pool, _ in source.table.pools))
    # The most that was ever in use at once may still rise a little: by less than a token's experts.
    experts = llm.layout.n_expert_used * len(llm.layout.moe_layers)
    assert taken[-1] - taken[50] < experts // 4
    assert source.prefetch.issued == source.prefetch.useful > 1000


def test_closing_in_the_middle_of_reads(load: Load) -> None:
    """Nothing hangs and nothing is left when a model with early reads under way is closed."""
    llm = with_budget(load, "qwen3moe", 0.2, route_ahead=2, route_ahead_compute="worker")
    evaluate(llm, token_batches(8))
    source = llm.source
    assert source
    source.read_early(3, [0, 1, 2, 3])
    assert source.cache.protected == 4
    llm.close()
    assert not any(t.name.startswith(("lane-", "predictor")) for t in threading.enumerate())
