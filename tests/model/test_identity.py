"""Streamed logits are the resident ones, bit for bit, in every cell.

A cell that never missed, never evicted or never stopped would prove nothing, so each asserts that
it did what its name says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import models
from support.library import PROMPTS, Library, csv_rows, evaluate
from support.pairwise import combined, pairwise
from support.readers import WAYS, Delayed

from routeahead import Llama
from routeahead.telemetry.recorder import Outputs

MODELS = [*models.FIXTURES, *models.QUANTS]
DECODED = sum(len(batches) - 1 for batches in PROMPTS)

Load = Callable[..., Llama]


def assert_same(llm: Llama, library: Library, name: str) -> None:
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


CELL = {
    "cache": ["none", "evicting", "full"],
    "overlap": [True, False],
    "lanes": [1, 2, 4],
    "shards": [1, 4],
    "direct": [True, False],
}
PAIRWISE = pairwise(CELL)
# The architectures that ask most different things of the stream: one product for two projections,
# and a scale for each expert; biases that follow the ids, and MXFP4; a layer without experts, a
# shared expert and groups. Of these, every combination of cache, overlap and lanes.
WHOLE = ["gemma4", "gpt-oss", "deepseek2-grouped"]


def cells() -> Iterator[Any]:
    """Every cell of every model, with the marks of those left to `make test-slow` and of those that
    `make test-fast` runs."""
    for name in MODELS:
        for cell in combined(CELL):
            plain_file = cell["shards"] == 1 and cell["direct"]
            daily = cell in PAIRWISE or (name in WHOLE and plain_file)
            overlap, direct = cell["overlap"], cell["direct"]
            words = [cell["cache"], "overlap" if overlap else "serial", f"{cell['lanes']}lanes"]
            words += [f"{cell['shards']}files", "direct" if direct else "buffered"]
            fast = [pytest.mark.fast] if name in WHOLE and cell in PAIRWISE else []
            marks = fast if daily else [pytest.mark.slow]
            yield pytest.param(name, *cell.values(), id="-".join([name, *words]), marks=marks)


@pytest.mark.parametrize(("name", *CELL), list(cells()))
def test_same_logits(
    load: Load,
    library: Library,
    name: str,
    cache: str,
    overlap: bool,
    lanes: int,
    shards: int,
    direct: bool,
) -> None:
    llm = load(
        name,
        shards=shards,
        cache_mb=0,
        overlap=overlap,
        io_threads=lanes,
        direct_io=direct,
        poison=cache == "evicting",
    )
    assert llm.direct_io == direct and len(llm.layout.shards) == shards
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
    elif llm.model_params.n_gpu_layers:  # one stop, at the first product, if all is there
        assert calls >= stops
    else:
        assert calls > stops  # products were announced while reads were pending


@pytest.mark.parametrize("variation", WAYS)
@pytest.mark.parametrize("name", models.FIXTURES)
def test_same_logits_another_way(load: Load, library: Library, name: str, variation: str) -> None:
    llm = load(name, cache_mb=0, **WAYS[variation])
    assert llm.source
    llm.source.cache.budget = llm.layout.token_bytes()
    assert_same(llm, library, name)
    assert llm.counters.decode.misses > 0 and llm.source.cache.evictions > 0


@pytest.mark.fast
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
