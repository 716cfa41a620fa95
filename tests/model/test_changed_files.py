"""A model's file that changes while the model runs: an error, and not text from other bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.library import PROMPTS, Library, evaluate

from routeahead import Llama, ReadError
from routeahead.experts.reader import CHECK_EVERY

NAME = "qwen3moe"


@pytest.fixture
def copy(library: Library, tmp_path: Path) -> Path:
    return Path(shutil.copy(library.path(NAME), tmp_path / "model.gguf"))


@pytest.fixture
def llm(copy: Path) -> Iterator[Llama]:
    llm = Llama(copy, n_ctx=256, n_batch=256, n_threads=1, cache_mb=0)
    yield llm
    llm.close()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)  # no whole block


def overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size // 2))
    os.utime(path, ns=(0, 0))  # certainly another time than the clock's last


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


@pytest.mark.parametrize("change", [truncate, overwrite, replace])
def test_a_change_is_noticed(llm: Llama, copy: Path, change: Callable[[Path], None]) -> None:
    prompt, *tokens = PROMPTS[0]
    llm.eval(prompt)
    llm.phase = "decode"
    assert llm.source
    change(copy)
    reads = llm.source.lanes.reads
    with pytest.raises(ReadError, match=r"layer \d+ expert \d+ .*(changed while|ends \d+ bytes)"):
        for token in tokens:
            llm.eval(token)
    assert llm.source.lanes.reads - reads < CHECK_EVERY
    with pytest.raises(ReadError):  # and it stays an error
        llm.eval(tokens[0])


def test_a_file_put_back_is_another_file(llm: Llama, copy: Path, library: Library) -> None:
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), library.resident(NAME)[0])
    shutil.copy(library.path(NAME), copy.with_suffix(".new"))
    copy.with_suffix(".new").replace(copy)
    with pytest.raises(ReadError, match="load the model again"):
        evaluate(llm, PROMPTS[0])
