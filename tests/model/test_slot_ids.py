"""Products are given slot numbers, everybody else the experts'; where all is here nothing stops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from support import models
from support.library import PROMPTS, Library, evaluate, with_budget

from routeahead import Llama, StreamError
from routeahead.experts import cache
from routeahead.llamacpp import ggml
from routeahead.llamacpp.eval_callback import EvalCallback
from routeahead.llamacpp.node_filter import POINTED, PRODUCTS, ROUTED, SLOT_IDS

Load = Callable[..., Llama]


def assert_same(llm: Llama, library: Library, name: str) -> None:
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


@pytest.mark.parametrize("name", models.FIXTURES)
def test_slots_are_not_experts(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With small parts, several pools of several layers; their slots are numbered anyhow."""
    monkeypatch.setattr(cache, "PART_SLOTS", models.FIXTURES[name].experts)
    llm = with_budget(load, name, 0.5, poison=True)
    assert_same(llm, library, name)
    source = llm.source
    assert source and source.settled is None
    assert len(source.table.pools) > len({t.expert_bytes for t in llm.layout.experts})
    assert any(len(layers) > 1 for _, layers in source.table.pools)
    differ = held = 0
    for layer, of in source.table.layers.items():
        here = np.flatnonzero(of.slots >= 0)
        assert {(layer, int(e)) in source.cache for e in here} <= {True}
        differ, held = differ + int((of.slots[here] != here).sum()), held + len(here)
        assert of.slots.max() < of.pool.count <= source.table.bound[layer]
    assert held == len(source.cache) and differ > held / 2


def test_a_graph_gets_its_ids_back(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp keeps the graph for the next token, and checks are made against its own ids."""
    llm = with_budget(load, "qwen3moe", 0.3)
    hook, seen = llm.streamed.callback, []
    state, check = hook._state, EvalCallback.check

    def noting(self: EvalCallback) -> None:
        behind = [int(state[PRODUCTS + i]) for i in range(int(state[POINTED]))]
        before = [ggml.tensor_at(product).src[2] for product in behind]
        topk = int(state[ROUTED])
        check(self)
        after = [ggml.tensor_at(product).src[2] for product in behind]
        seen.append((before, after, topk))

    monkeypatch.setattr(EvalCallback, "check", noting)
    evaluate(llm, PROMPTS[0])
    assert len(seen) == len(PROMPTS[0])
    for before, after, topk in seen:
        assert before and set(before) == {int(state[SLOT_IDS])} and set(after) == {topk}


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2", "mixed"])
def test_no_stop_once_everything_is_here(
    load: Load, library: Library, name: str, poison: bool
) -> None:
    llm = load(name, cache_mb=64, poison=poison)
    source, layout = llm.source, llm.layout
    assert source and source.settled is None
    assert_same(llm, library, name)
    settled = source.settled
    assert settled is not None
    assert 0 < settled[layout.moe_layers].sum() < settled[layout.moe_layers].size
    for layer in layout.moe_layers:  # what random tokens have left out
        for _ in range(2):
            load_ = source.require(layer, list(range(layout.n_expert)))
            if load_:
                source.wait(load_)
    decode = llm.counters.decode
    before, hits, misses = llm.stops, decode.hits, decode.misses
    assert_same(llm, library, name)
    decoded = sum(len(batches) - 1 for batches in PROMPTS)
    stops = llm.stops - before
    assert stops == len(layout.moe_layers) * len(PROMPTS)  # the prompts' alone
    assert decode.misses == misses
    assert decode.hits - hits == decoded * len(layout.moe_layers) * layout.n_expert_used
    source.recover()  # and again from nothing
    assert_same(llm, library, name)
    assert decode.misses > misses


def test_nothing_is_settled_in_a_cache_that_was_emptied(load: Load, library: Library) -> None:
    """Also if its budget is what it was: the slots' books must forget with the cache's."""
    llm = load("qwen3moe", cache_mb=64, poison=True)
    source = llm.source
    assert source
    assert_same(llm, library, "qwen3moe")
    misses = llm.counters.prefill.misses + llm.counters.decode.misses
    assert source.settled is not None and source.settled[llm.layout.moe_layers].any()
    source.cache.budget = source.cache.budget
    source.begin()
    assert not source.settled[llm.layout.moe_layers].any()
    assert_same(llm, library, "qwen3moe")
    assert llm.counters.prefill.misses + llm.counters.decode.misses == 2 * misses


def test_an_expert_on_its_way_is_not_settled(load: Load, library: Library) -> None:
    llm = load("qwen3moe", cache_mb=64)
    source = llm.source
    assert source
    source.begin()
    for expected in (False, True):
        load_ = source.require(2, [3, 5])
        assert source.settled is not None
        assert source.settled[2, [3, 5]].tolist() == [expected] * 2
        if load_:
            source.wait(load_)
    assert source.settled[llm.layout.moe_layers].sum() == 2


def test_a_prompt_gives_memory_back(load: Load) -> None:
    """Without a cache, one layer's experts stand in memory, whatever sizes layers have, and what is
    read ahead for the next."""
    llm = load("mixed", cache_mb=0)
    source, layout = llm.source, llm.layout
    assert source
    evaluate(llm, [list(range(3, 200))])
    held = sum(pool.count * pool.stride for pool, _ in source.table.pools)
    strides = max(pool.stride for pool, _ in source.table.pools)
    assert len(source.table.pools) == 2
    beside = -(-source.window // layout.largest_expert())
    assert held <= (layout.n_expert + layout.n_expert_used + beside) * strides


@pytest.mark.parametrize("cache_mb", [0, 1])
def test_slots_that_were_forgotten_are_noticed(
    load: Load, monkeypatch: pytest.MonkeyPatch, cache_mb: int
) -> None:
    """Those of the layer before are in the tensor: with them, another layer's experts would do."""
    llm = load("qwen3moe", cache_mb=cache_mb, force_cache=bool(cache_mb), overlap=not cache_mb)
    evaluate(llm, PROMPTS[0][:3])
    calls, use_slots = 0, EvalCallback.use_slots

    def forgetful(self: EvalCallback, slots: npt.NDArray[np.int32]) -> None:
        nonlocal calls
        calls += 1
        if calls != 3:
            use_slots(self, slots)

    monkeypatch.setattr(EvalCallback, "use_slots", forgetful)
    with pytest.raises(StreamError):
        llm.eval(PROMPTS[0][4])
    assert calls == 3
