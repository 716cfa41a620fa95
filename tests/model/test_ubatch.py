"""How many rows of a prompt are evaluated at once."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import psutil
import pytest
from support import models
from support.library import THREADS, Library, evaluate

from routeahead import Llama, SettingsError
from routeahead.engine.ubatch import DEFAULT, MOST, buffer_bytes, ubatch_rows
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout

NAME = "qwen3moe"
SMALL = {"cache_mb": 1, "force_cache": True, "n_threads": THREADS}


def rows(llm: Llama) -> tuple[int, int]:
    return llm.context_params.n_ubatch, llm.n_batch


@pytest.mark.fast
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (2048, 2048)),
        ({"ubatch": 700}, (700, 700)),
        ({"n_batch": 300}, (300, 300)),
        ({"n_ubatch": 200}, (200, 512)),
        ({"ubatch": 700, "n_batch": 600, "n_ubatch": 100}, (100, 600)),
        ({"logits_all": True}, (512, 512)),
        ({"cache_mb": 400, "force_cache": False}, (512, 512)),  # a second ubatch reads nothing
        ({"n_ctx": 1000}, (1024, 1000)),
    ],
)
def test_what_was_given_wins(
    library: Library, given: dict[str, int], expected: tuple[int, int]
) -> None:
    llm = Llama(library.path(NAME), **{"n_ctx": 2048, **SMALL, **given})
    ubatch, batch = expected
    assert rows(llm) == (min(ubatch, batch), batch)
    if not given.get("logits_all"):
        assert len(llm.scores) <= DEFAULT
    copy = pickle.loads(pickle.dumps(llm))
    assert rows(copy) == rows(llm)
    copy.close()
    llm.close()


@pytest.mark.fast
def test_a_resident_model_has_llama_cpps_unless_told(library: Library) -> None:
    for given, expected in (({}, (512, 512)), ({"ubatch": 64}, (64, 64))):
        llm = Llama(library.path(NAME), n_ctx=2048, n_threads=THREADS, resident=True, **given)
        assert rows(llm) == expected
        llm.close()


@pytest.mark.fast
@pytest.mark.parametrize("value", [0, -1, "many", 1.5])
def test_what_is_no_number_of_rows(library: Library, value: object) -> None:
    with pytest.raises(SettingsError, match="ubatch is"):
        Llama(library.path(NAME), ubatch=value)


@pytest.mark.fast
def test_as_many_rows_as_memory_allows(library: Library) -> None:
    layout = read_layout(library.path(NAME))
    least = buffer_bytes(layout, 1, 8192, flash_attention=False)

    def chosen(free: int, context: int = 8192, cache: int = 0) -> int:
        return ubatch_rows(layout, context, free=free, cache=cache)

    assert chosen(8 * MOST * least) == MOST
    assert chosen(8 * MOST * least - 1) == MOST // 2
    assert chosen(0) == chosen(-1) == DEFAULT
    assert chosen(1 << 40, context=700) == 1024  # llama.cpp takes the context's if it is less
    assert chosen(1 << 40, context=100) == DEFAULT
    assert chosen(1 << 40, cache=layout.expert_bytes) == DEFAULT
    flash = buffer_bytes(layout, 1, 8192, flash_attention=True)
    assert flash < least / 2


_RESERVED = re.compile(r"CPU compute buffer size =\s*([\d.]+) MiB")


@pytest.mark.parametrize("name", models.FIXTURES)
def test_the_buffer_is_what_llama_cpp_reserves_at_most(
    library: Library, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """Without what it reserves for logits, which are written for rows with an output alone."""
    path = library.path(name)
    for context in (512, 4096):
        capfd.readouterr()
        llm = Llama(
            path, n_ctx=context, n_threads=THREADS, ubatch=512, cache_mb=0, verbose=True,
            n_batch=512,
        )  # fmt: skip
        said = capfd.readouterr().err
        logits = 4 * 512 * llm.n_vocab()
        reserved = sum(float(n) for n in _RESERVED.findall(said)) * MIB
        estimate = buffer_bytes(llm.layout, 512, context, flash_attention=False)
        llm.close()
        assert reserved - logits <= 1.05 * estimate, (name, context, reserved / estimate)
        assert estimate <= 3 * reserved, (name, context, reserved / estimate)


def test_long_prompts_pass_over_the_file_once(library: Library) -> None:
    """And equal those of a resident model with the same ubatch."""
    path = library.path(NAME)
    prompt = np.random.default_rng(4).integers(3, 259, size=1011).tolist()
    llm = Llama(path, n_ctx=2048, **SMALL)
    resident = Llama(path, n_ctx=2048, n_threads=THREADS, resident=True, ubatch=2048)
    logits = [evaluate(one, [prompt, [7], [9]]) for one in (llm, resident)]
    np.testing.assert_array_equal(*logits)
    experts = len(llm.layout.moe_layers) * llm.layout.n_expert
    assert llm.counters.prefill.reads <= 3 * experts
    llm.close()
    resident.close()


def test_the_budget_counts_window_and_buffer(large: Path) -> None:
    free = psutil.virtual_memory().available
    llm = Llama(large, n_ctx=4096, n_threads=THREADS, ubatch=2048, cache_mb=20)
    budget, window = llm.streamed.budget, llm.streamed.stream._window
    assert free > 1 << 30
    extra = [buffer_bytes(llm.layout, n, 4096, flash_attention=False) for n in (2048, 512)]
    beside = llm.source.window + llm.source.cache.spare
    assert budget._beside == beside + extra[0] - extra[1]
    assert llm.source.window == llm.source.cache.spare == llm.layout.layer_bytes()
    assert budget._held() == 0
    llm.eval(np.random.default_rng(4).integers(3, 259, size=1011).tolist())
    assert budget._held() == llm.source.held + window.buffer(1011) > llm.source.cache.used
    llm.close()
