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


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_a_state_comes_back_bit_by_bit(load: Load, tmp_path: Path, name: str) -> None:
    llm, prompt = load(name), tokens(1)
    logits(llm, prompt)
    PromptCache(tmp_path, LIMIT, llm).save(llm)
    expected, evaluated = logits(llm, [*prompt, 7])
    assert evaluated == 1
    other = load(name)
    cache = PromptCache(tmp_path, LIMIT, other)  # as another process would
    cache.restore(other, [*prompt, 7])
    found, evaluated = logits(other, [*prompt, 7])
    assert evaluated == 1 and np.array_equal(found, expected)
    # A conversation that only begins alike is evaluated from where it differs.
    last = [*prompt[:30], 9, 8]
    third = load(name)
    PromptCache(tmp_path, LIMIT, third).restore(third, last)
    assert logits(third, last)[1] == 2


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
    same = load("qwen3moe", cache_mb=0, io_threads=1)  # exact settings make no difference
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
