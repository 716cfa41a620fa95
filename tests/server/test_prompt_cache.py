"""States of conversations on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from routeahead import Llama
from routeahead.server.prompt_cache import PromptCache

LIMIT = 1 << 26
Load = Callable[..., Llama]


def tokens(seed: int, count: int = 40) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(5, 200, count)]


def logits(llm: Llama, prompt: list[int]) -> tuple[Any, int]:
    """The logits behind a prompt, and how many of its tokens were evaluated for them."""
    before = llm.counters.prefill.tokens
    step = llm.generate(prompt, temp=0)
    next(step)
    step.close()
    row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    copy = np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)).copy()
    return copy, llm.counters.prefill.tokens - before


# A loaded context has its rows in another order, if there is a sliding window.
@pytest.mark.parametrize(
    ("name", "apart"), [("qwen3moe", 0.0), ("gpt-oss", 1e-5), ("deepseek2", 0.0)]
)
def test_a_state_comes_back_bit_by_bit(load: Load, tmp_path: Path, name: str, apart: float) -> None:
    llm, prompt = load(name), tokens(1)
    logits(llm, prompt)
    PromptCache(tmp_path, LIMIT, llm).save(llm)
    expected, evaluated = logits(llm, [*prompt, 7])
    assert evaluated == 1
    other = load(name)
    cache = PromptCache(tmp_path, LIMIT, other)  # as another process would
    cache.restore(other, [*prompt, 7])
    found, evaluated = logits(other, [*prompt, 7])
    assert evaluated == 1 and np.abs(found - expected).max() <= apart
    # A conversation that only begins alike is evaluated from where it differs.
    last = [*prompt[:30], 9, 8]
    third = load(name)
    PromptCache(tmp_path, LIMIT, third).restore(third, last)
    found, evaluated = logits(third, last)
    assert evaluated == 2
    fourth = load(name)
    logits(fourth, prompt[:30])
    assert np.abs(found - logits(fourth, last)[0]).max() < 1e-2  # batches of other sizes


def test_a_conversation_that_is_cut_back_keeps_its_window(load: Load, tmp_path: Path) -> None:
    """A loaded context lets new tokens take the places of those outside of a sliding window."""
    llm, prompt = load("gpt-oss"), tokens(1, 100)
    window = llama_cpp.llama_model_n_swa(llm.model)
    assert 0 < window < 60
    logits(llm, prompt)
    PromptCache(tmp_path, LIMIT, llm).save(llm)
    other = load("gpt-oss")
    cache = PromptCache(tmp_path, LIMIT, other)
    longer = [*prompt, *tokens(2, 60)]
    cache.restore(other, longer)
    assert logits(other, longer)[1] == 60
    for path in tmp_path.iterdir():
        path.unlink()
    early = [*prompt[:50], 9, 8]
    cache.restore(other, early)
    found, evaluated = logits(other, early)
    expected, _ = logits(load("gpt-oss"), early)
    assert np.abs(found - expected).max() < 1e-2
    assert evaluated == len(early)


def test_a_damaged_file_is_removed_and_not_read(load: Load, tmp_path: Path) -> None:
    llm, prompt = load("qwen3moe"), tokens(1)
    logits(llm, prompt)
    PromptCache(tmp_path, LIMIT, llm).save(llm)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    # llama.cpp itself ends the process over the first of these.
    for data in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1]), whole[:300], b"", b"abc"):
        path.write_bytes(data)
        other = load("qwen3moe")
        PromptCache(tmp_path, LIMIT, other).restore(other, [*prompt, 7])
        assert other.n_tokens == 0 and logits(other, [*prompt, 7])[1] == len(prompt) + 1
        path.unlink(missing_ok=True)


def test_what_computes_something_else_gets_nothing(load: Load, tmp_path: Path) -> None:
    llm, prompt = load("qwen3moe"), tokens(1)
    logits(llm, prompt)
    PromptCache(tmp_path, LIMIT, llm).save(llm)
    for other in (load("qwen3moe", n_expert_used=1), load("gpt-oss")):
        PromptCache(tmp_path, LIMIT, other).restore(other, prompt)
        assert other.n_tokens == 0
    for exact in ({"cache_mb": 0, "io_threads": 1}, {"cache_policy": "lru", "overlap": False}):
        same = load("qwen3moe", **exact)
        PromptCache(tmp_path, LIMIT, same).restore(same, [*prompt, 7])
        assert same.n_tokens == len(prompt)


def test_a_longer_turn_replaces_its_beginning(load: Load, tmp_path: Path) -> None:
    llm, prompt = load("qwen3moe"), tokens(1)
    cache = PromptCache(tmp_path, LIMIT, llm)
    for length in (20, 40):
        logits(llm, prompt[:length])
        cache.save(llm)
        cache.save(llm)  # what is written already is not written again
        assert len(list(tmp_path.iterdir())) == 1
    logits(llm, tokens(2))
    cache.save(llm)
    assert len(list(tmp_path.iterdir())) == 2
    logits(llm, [5, 6, 7])
    cache.save(llm)  # too short to be worth a file
    assert len(list(tmp_path.iterdir())) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_the_folder_stays_within_its_size(load: Load, tmp_path: Path) -> None:
    llm = load("qwen3moe")
    PromptCache(tmp_path / "one", LIMIT, llm)
    logits(llm, tokens(0))
    PromptCache(tmp_path / "one", LIMIT, llm).save(llm)
    (one,) = (tmp_path / "one").iterdir()
    size = one.stat().st_size
    folder = tmp_path / "all"
    cache = PromptCache(folder, 3 * size + 100, llm)
    for seed in range(6):
        logits(llm, tokens(seed))
        cache.save(llm)
        assert sum(p.stat().st_size for p in folder.iterdir()) <= 3 * size + 100
    assert len(list(folder.iterdir())) == 3
    fresh = load("qwen3moe")
    cache = PromptCache(folder, 3 * size + 100, fresh)
    cache.restore(fresh, tokens(0))
    assert fresh.n_tokens == 0  # the oldest went
    cache.restore(fresh, [*tokens(5), 7])
    assert fresh.n_tokens == 40
    small = PromptCache(tmp_path / "small", size - 1, llm)
    small.save(llm)  # it would never fit
    assert not list((tmp_path / "small").iterdir())


def test_a_write_that_fails_leaves_nothing(load: Load, tmp_path: Path) -> None:
    llm = load("qwen3moe")
    cache = PromptCache(tmp_path / "gone", LIMIT, llm)
    logits(llm, tokens(1))
    (tmp_path / "gone").rmdir()
    with pytest.raises(OSError):
        cache.save(llm)
    (tmp_path / "gone").mkdir()
    left, recent = tmp_path / "gone" / "a.tmp", tmp_path / "gone" / "b.tmp"
    left.touch(), recent.touch()
    os.utime(left, (time.time() - 3600,) * 2)  # of a process that was killed long ago
    PromptCache(tmp_path / "gone", LIMIT, llm).save(llm)
    assert not left.exists() and recent.exists()
    assert len(list((tmp_path / "gone").glob("*.kv"))) == 1
