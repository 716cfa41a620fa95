"""Prompts: what later layers need is read while a layer computes, and changes nothing else."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support import models
from support.library import THREADS, Library, evaluate, with_budget
from support.readers import Delayed, Unruly, disk_error, interrupt

from routeahead import Llama, Model, Policy, ReadError, Routing
from routeahead.engine.window import Usage
from routeahead.experts.guesses import Guess
from routeahead.experts.reader import Reader
from routeahead.experts.source import ExpertSource
from routeahead.telemetry.io_trace import read_io_trace
from routeahead.telemetry.recorder import Outputs

Load = Callable[..., Llama]
NAME = "qwen3moe"
UBATCH = 8


def prompts(seed: int) -> list[list[list[int]]]:
    """Two prompts of several ubatches, the second one longer than what fits in one batch; a few
    tokens are decoded after each."""
    tokens = np.random.default_rng(seed).integers(3, 259, size=100).tolist()
    first, second = tokens[:30], tokens[40:83]
    return [[first, *([t] for t in tokens[30:34])], [second, *([t] for t in tokens[90:93])]]


def cut(llm: Llama) -> Llama:
    """Batches of three ubatches."""
    llm.n_batch = 3 * UBATCH
    return llm


@pytest.fixture(scope="module")
def expected(library: Library) -> Callable[[str], list[np.ndarray]]:
    """Logits of `prompts(1)`, resident with the same ubatch, by fixture."""
    known: dict[str, list[np.ndarray]] = {}

    def logits(name: str) -> list[np.ndarray]:
        if name not in known:
            llm = Llama(
                library.path(name), n_ctx=256, n_batch=256, n_ubatch=UBATCH, n_threads=THREADS,
                resident=True,
            )  # fmt: skip
            known[name] = [evaluate(cut(llm), batches) for batches in prompts(1)]
            llm.close()
        return known[name]

    return logits


Expected = Callable[[str], list[np.ndarray]]


def assert_same(llm: Llama, expected: Sequence[np.ndarray]) -> None:
    for batches, logits in zip(prompts(1), expected, strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), logits)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0], ids=["none", "evicting", "full"])
@pytest.mark.parametrize("name", models.FIXTURES)
def test_same_logits(load: Load, expected: Expected, name: str, share: float) -> None:
    """Delayed and reordered reads, an arena in which an unread page is a crash."""
    llm = cut(with_budget(load, name, share, n_ubatch=UBATCH, poison=True, wrap_reader=Delayed))
    assert_same(llm, expected(name))
    ahead = llm.source.ahead
    assert ahead.useful <= ahead.completed <= ahead.issued > 0
    assert ahead.useful > 0 or share == 1.0  # then little is missing
    assert not llm.source._guesses and llm.source.cache.protected == 0


@pytest.mark.fast
@pytest.mark.parametrize("experts", [0, 1, 5])
@pytest.mark.parametrize("name", [NAME, "mixed"])
def test_the_window_bounds_what_is_read_ahead(
    load: Load, expected: Expected, monkeypatch: pytest.MonkeyPatch, name: str, experts: int
) -> None:
    """It may hold a part of a layer, or nothing."""
    llm = cut(with_budget(load, name, 0.2, n_ubatch=UBATCH, poison=True))
    source, layout, most = llm.source, llm.layout, [0]
    source.window = experts * layout.largest_expert() + 1
    read_ahead = ExpertSource.read_ahead

    def watched(self: ExpertSource, layer: int, wanted: Sequence[int]) -> bool:
        answer = read_ahead(self, layer, wanted)
        most[0] = max(most[0], len(self._guesses))
        return answer

    monkeypatch.setattr(ExpertSource, "read_ahead", watched)
    assert_same(llm, expected(name))
    assert most[0] == experts
    assert (source.ahead.issued > 0) == (source.lanes.ahead_bytes > 0) == (experts > 0)
    room = source.cache.budget + layout.layer_bytes() + source.window
    stride = max(pool.stride for pool, _ in source.table.pools) / min(
        layout.bytes_by_layer().values()
    )
    assert source.held <= room * stride + (llm.settings.io_threads + 1) * layout.largest_expert()


@pytest.mark.fast
def test_the_cache_holds_what_it_would_without(load: Load) -> None:
    """Reading ahead evicts nothing: hits and misses are those of a run that never does."""
    counts = []
    for settings in ({}, {"overlap": False}):
        llm = cut(with_budget(load, NAME, 0.3, n_ubatch=UBATCH, **settings))
        for batches in prompts(1):
            evaluate(llm, batches)
        totals = (llm.counters.prefill, llm.counters.decode)
        counts.append([(one.hits, one.misses) for one in totals])
        counts[-1].append((llm.counters.decode.bytes_read, llm.source.cache.evictions))
        assert (llm.source.ahead.issued > 0) == (not settings)
    assert counts[0] == counts[1]


def test_each_ubatch_reads_what_it_uses_once(load: Load, tmp_path: Path) -> None:
    """What was taken back by mistake and read on demand would be there twice."""
    path = tmp_path / "io.csv"
    llm = cut(with_budget(load, NAME, 0, n_ubatch=UBATCH, outputs=Outputs(io_trace=path)))
    evaluate(llm, prompts(1)[0])
    ubatches = -(-len(prompts(1)[0][0]) // UBATCH)
    llm.close()
    columns = read_io_trace(path)
    prompt = columns["phase"] == "prefill"
    keys = ("layer", "expert", "projection")
    reads = list(zip(*(columns[key][prompt].tolist() for key in keys), strict=True))
    assert max(reads.count(one) for one in set(reads)) <= ubatches
    assert not (columns["kind"] == "ahead")[~prompt].any()


def test_a_prompt_of_one_ubatch_reads_no_expert_twice(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "io.csv"
    llm = with_budget(load, NAME, 0, outputs=Outputs(io_trace=path))
    evaluate(llm, prompts(1)[0][:1])
    llm.close()
    columns = read_io_trace(path)
    keys = ("layer", "expert", "projection")
    reads = list(zip(*(columns[key].tolist() for key in keys), strict=True))
    assert len(reads) == len(set(reads))


def test_later_layers_are_read_while_one_computes(load: Load) -> None:
    """With a disk that is fast enough, a layer finds its experts there: stalls end after the first
    layer, and demand reads with them."""
    llm = with_budget(load, NAME, 0)
    source, waited = llm.source, []
    routed = llm.streamed.stream._window.routed

    def rest(layer: int, ids: np.ndarray) -> None:
        routed(layer, ids)
        demanded = source.lanes._queues["demand"]
        waited.append(len(demanded))
        while source.lanes._queues["ahead"] or demanded:
            time.sleep(0.001)
        time.sleep(0.01)

    llm.streamed.stream._window.routed = rest  # type: ignore[method-assign]
    llm.eval(prompts(1)[0][0])
    layers = len(llm.layout.moe_layers)
    assert waited[0] > 0 and len(waited) == layers
    assert waited[1 : layers - 1] == [0] * (layers - 2)
    assert waited[-1] > 0  # one row: not read ahead


# --- the waits (test_prompt_waits.py has each alone) ---


def test_a_missing_wait_is_seen(
    load: Load, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests of logits above can fail: reads in flight are taken for what has arrived."""
    wrap = functools.partial(Delayed, longest_s=0.01)
    llm = cut(with_budget(load, NAME, 0.1, n_ubatch=UBATCH, io_threads=4, wrap_reader=wrap))
    assert_same(llm, expected(NAME))
    monkeypatch.setattr(Guess, "landed", True)
    with pytest.raises(AssertionError):
        for _ in range(5):
            assert_same(llm, expected(NAME))
    llm.source.lanes.drain()


# --- faults ---


@pytest.mark.parametrize("poison", [True, False])
def test_cut_off_anywhere(load: Load, expected: Expected, poison: bool) -> None:
    """Prompts back to back under delays, some of them cut off by a fault or a signal, half of which
    strike a read that was made ahead: what comes to its end is right."""
    made: list[Unruly] = []

    def wrap(inner: Reader) -> Reader:
        made.append(Unruly(inner))
        return made[0]

    llm = cut(with_budget(load, NAME, 0.2, n_ubatch=UBATCH, wrap_reader=wrap, poison=poison))
    rng, ended = random.Random(3), {True: 0, False: 0}
    for schedule in range(24):
        made[0].schedule(schedule)
        which = rng.randrange(2)
        if rng.random() < 0.7:
            made[0].strike(rng.randrange(1, 400), disk_error if poison else interrupt)
        try:
            logits = evaluate(llm, prompts(1)[which])
        except (ReadError, KeyboardInterrupt):
            ended[False] += 1
        else:
            np.testing.assert_array_equal(logits, expected(NAME)[which])
            ended[True] += 1
        made[0].strike(0, disk_error)
    assert min(ended.values()) > 3


def test_a_prompt_that_is_broken_off(load: Load, expected: Expected) -> None:
    """Ctrl-C between two batches: what was read ahead for the next one is nobody's."""
    llm = cut(with_budget(load, NAME, 0.3, n_ubatch=UBATCH, poison=True, wrap_reader=Delayed))
    run, batches = llm._run, itertools.count()

    def between(batch: object) -> None:
        if next(batches) == 1:
            raise KeyboardInterrupt
        run(batch)

    llm._run = between  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.eval(prompts(1)[1][0])
    assert llm.source._guesses
    llm._run = run  # type: ignore[method-assign]
    llm.phase = "decode"
    llm.eval([7])
    llm.phase = None
    assert_same(llm, expected(NAME))


class EarlyInPrompts(Policy):
    """Reads early in prompts, too, what the next layer is said to use."""

    def bind(self, model: Model) -> None:
        self._model = model

    def issued(self, routing: Routing) -> None:
        for layer in self._model.after(routing.layer, 1):
            self._model.experts.read_early(layer, [0, 3, 5, 6])


def test_a_policy_that_reads_early_in_prompts(load: Load, expected: Expected) -> None:
    llm = cut(
        with_budget(
            load, NAME, 0.3, n_ubatch=UBATCH, poison=True, wrap_reader=Delayed,
            policies=[EarlyInPrompts()],
        )
    )  # fmt: skip
    for _ in range(3):
        assert_same(llm, expected(NAME))
    assert llm.source.prefetch.issued > 0 < llm.source.ahead.issued


def test_rows_that_are_alike(load: Load) -> None:
    """One token again and again uses few experts: the rest of each layer is left alone."""
    llm = with_budget(load, NAME, 0)
    llm.eval([7] * 60)
    used = llm.source.cache.misses
    assert used < len(llm.layout.moe_layers) * llm.layout.n_expert / 2
    assert llm.source.ahead.issued < used


def test_dropping_in_prompts_does_not_depend_on_the_disk(load: Load) -> None:
    """What is dropped depends on what is here: nothing is read ahead."""
    settings = {"drop_cold_experts": 0.5, "drop_in_prefill": True}
    logits = []
    for wrap in (None, Delayed):
        hooks = {"wrap_reader": wrap} if wrap else {}
        llm = cut(with_budget(load, NAME, 0.3, n_ubatch=UBATCH, **hooks, **settings))
        logits += [evaluate(llm, batches) for batches in prompts(1)]
        assert llm.source.ahead.issued == 0
    for one, other in zip(logits[:2], logits[2:], strict=True):
        np.testing.assert_array_equal(one, other)


def test_usage() -> None:
    """Of many rows all experts; of few those that rows before used; of one, one in two rows'."""
    usage = Usage(8, 2)
    assert not usage.known
    assert usage.likely(1) == usage.likely(0) == [] and usage.likely(3) == list(range(8))
    ids = np.array([[5, 1], [5, 2], [5, 1], [5, 7]], np.int32)
    assert usage.add(ids) == pytest.approx(math.log(0.5) / math.log(0.75)) and usage.known
    assert Usage(8, 2).add(np.arange(16, dtype=np.int32).reshape(8, 2) % 8) == 8
    assert usage.likely(1) == [5]
    assert usage.likely(2) == [5, 1]
    assert usage.likely(3) == [5, 1, 2, 7]
    assert usage.likely(100)[:4] == [5, 1, 2, 7] and len(usage.likely(100)) == 8
    for _ in range(9):
        usage.add(ids[:, ::-1] * 0)
    assert usage.likely(1)[0] == 0
