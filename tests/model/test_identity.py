"""Streamed logits are the resident ones, bit for bit, in every cell.

A cell that never missed, never evicted or never stopped would prove nothing, so each asserts that
it did what its name says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import models
from support.library import PROMPTS, Library, csv_rows, evaluate
from support.readers import Delayed

from routeahead import Llama
from routeahead.telemetry.recorder import Outputs

MODELS = [*models.FIXTURES, *models.QUANTS]
DECODED = sum(len(batches) - 1 for batches in PROMPTS)

Load = Callable[..., Llama]


def assert_same(llm: Llama, library: Library, name: str) -> None:
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("cache", ["none", "evicting", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_same_logits(
    load: Load, library: Library, name: str, cache: str, overlap: bool, lanes: int
) -> None:
    llm = load(name, cache_mb=0, overlap=overlap, io_threads=lanes, poison=cache == "evicting")
    source = llm.source
    assert source
    layout = llm.layout
    source.cache.budget = {
        "none": 0,
        "evicting": layout.token_bytes(),
        "full": layout.expert_bytes,
    }[cache]
    assert_same(llm, library, name)

    decode, layers = llm.counters.decode, len(layout.moe_layers)
    routed = DECODED * layers * layout.n_expert_used
    assert decode.hits + decode.misses == routed
    assert decode.bytes_read >= decode.misses * min(layout.bytes_by_layer().values())
    if cache == "none":
        assert decode.hits == 0
    if cache == "evicting":
        assert source.cache.evictions > 0 and decode.hits > 0 and decode.misses > 0
    if cache == "full":
        assert source.cache.evictions == 0 and 0 < decode.misses < routed
    stops = layers * (DECODED + len(PROMPTS))
    calls = llm.stops
    if cache == "full":  # what has settled is looked up without a call
        assert 0 < calls < stops if not overlap else calls > 0
    elif not overlap:
        assert calls == stops
    else:
        assert calls > stops  # products were announced while reads were pending


VARIATIONS: dict[str, dict[str, object]] = {
    "shards": {"shards": 4},
    "shards-buffered": {"shards": 4, "direct_io": False},
    "buffered": {"direct_io": False},
    "mapped-dense": {"dense": "mmap", "poison": True},
    "delayed": {"wrap_reader": Delayed, "poison": True},
    "delayed-lanes": {"wrap_reader": Delayed, "io_threads": 4},
    "delayed-serial": {"wrap_reader": Delayed, "overlap": False},
}


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("name", models.FIXTURES)
def test_same_logits_another_way(load: Load, library: Library, name: str, variation: str) -> None:
    llm = load(name, cache_mb=0, **VARIATIONS[variation])
    assert llm.source
    llm.source.cache.budget = llm.layout.token_bytes()
    assert_same(llm, library, name)
    assert llm.counters.decode.misses > 0 and llm.source.cache.evictions > 0
    assert llm.direct_io == VARIATIONS[variation].get("direct_io", True)
    assert len(llm.layout.shards) == VARIATIONS[variation].get("shards", 1)


@pytest.mark.parametrize("forgotten", ["gate", "up", "down", None])
def test_a_missing_wait_is_seen(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch, forgotten: str | None
) -> None:
    """The checks above can fail: without one of the four waits, delayed reads give other logits."""
    serial = forgotten is None
    llm = load("qwen3moe", cache_mb=0, overlap=not serial, wrap_reader=Delayed)
    source = llm.source
    assert source
    assert_same(llm, library, "qwen3moe")
    wait = source.wait

    def forgetful(load_: Load, projection: str | None = None) -> None:
        if projection != forgotten:
            wait(load_, projection)

    monkeypatch.setattr(source, "wait", forgetful)
    with pytest.raises(AssertionError):
        assert_same(llm, library, "qwen3moe")


@pytest.mark.parametrize("name", ["qwen3moe", "mixed", "gemma4"])
@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
def test_prompts_longer_than_a_ubatch(
    load: Load, library: Library, tmp_path: Path, name: str, traced: bool
) -> None:
    """All ubatches but the last give no output, so their last layer routes no row at all."""
    trace = tmp_path / "route.csv"
    outputs = Outputs(route_trace=trace) if traced else Outputs()
    llm = load(name, cache_mb=0, n_ubatch=4, outputs=outputs)
    resident = load(name, resident=True, n_ubatch=4)
    for batches in PROMPTS:
        np.testing.assert_array_equal(evaluate(llm, batches), evaluate(resident, batches))
    llm.close()
    if traced:
        longest = max(len(batches[0]) + len(batches) - 1 for batches in PROMPTS)
        for layer in llm.layout.moe_layers[:-1]:
            steps = {int(r["step"]) for r in csv_rows(trace) if int(r["layer"]) == layer}
            assert steps == set(range(longest))


def test_chat_completion_streams_and_equals_resident(load: Load, library: Library) -> None:
    messages = [{"role": "user", "content": "abc"}]
    texts = []
    for settings in ({"resident": True}, {"cache_mb": 0}):
        llm = load("qwen3moe", **settings)
        chunks = llm.create_chat_completion(
            messages, stream=True, max_tokens=12, temperature=0, stop=["\x00\x00"]
        )
        texts.append([c["choices"][0]["delta"].get("content", "") for c in chunks])
    assert texts[0] == texts[1] and "".join(texts[0])


def test_saved_state_grammar_and_logprobs(load: Load) -> None:
    from llama_cpp import LlamaGrammar

    grammar = LlamaGrammar.from_string('root ::= "a" | "b" root', verbose=False)
    outcomes = []
    for settings in ({"resident": True}, {"cache_mb": 0}):
        llm = load("olmoe", logits_all=True, **settings)
        first = llm.create_completion("xy", max_tokens=6, temperature=0, logprobs=2)
        llm.eval(llm.tokenize(b"hello"))
        state = llm.save_state()
        llm.reset()
        llm.load_state(state)
        guided = llm.create_completion("xyz", max_tokens=6, temperature=0, grammar=grammar)
        outcomes.append(
            (
                first["choices"][0]["text"],
                first["choices"][0]["logprobs"]["token_logprobs"],
                guided["choices"][0]["text"],
                state.n_tokens,
            )
        )
    assert outcomes[0] == outcomes[1]
    assert set(outcomes[0][2]) <= {"a", "b"}
