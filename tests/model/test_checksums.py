"""Bytes that change where size and times do not: noticed before a token is computed with them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from support.library import PROMPTS, Library, evaluate
from typer.testing import CliRunner

from routeahead import Llama, ModelError, ReadError, SettingsError
from routeahead.cli.checksum import checksum
from routeahead.engine.checksums import (
    Checksums,
    Verified,
    checksums_path,
    read_checksums,
    verify_dense,
    write_checksums,
)
from routeahead.engine.streamed_model import Hooks
from routeahead.experts.arena import Arena
from routeahead.experts.dense import read_dense
from routeahead.experts.layout import ModelLayout
from routeahead.experts.reader import FileReader
from routeahead.llamacpp.gguf_file import read_layout

NAME = "qwen3moe"


@pytest.fixture(params=[1, 2], ids=["one file", "two files"])
def layout(library: Library, tmp_path: Path, request: pytest.FixtureRequest) -> ModelLayout:
    """A copy of a model, which a test may damage."""
    first = library.path(NAME, request.param)
    for path in first.parent.glob("*.gguf"):
        shutil.copy(path, tmp_path)
    return read_layout(tmp_path / first.name)


def flip(path: Path, offset: int) -> None:
    """Changes one bit, and leaves size and times as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def load(layout: ModelLayout, sums: Checksums, **settings: object) -> Llama:
    return Llama(
        layout.shards[0].path, n_ctx=256, n_batch=256, n_threads=1, cache_mb=0,
        _hooks=Hooks(wrap_reader=lambda inner: Verified(inner, layout, sums)), **settings,
    )  # fmt: skip


def test_a_sound_model_gives_the_resident_logits(layout: ModelLayout, library: Library) -> None:
    assert write_checksums(layout) == checksums_path(layout)
    llm = load(layout, read_checksums(layout))
    for batches, expected in zip(PROMPTS, library.resident(NAME), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    llm.close()


@pytest.mark.parametrize("place", [0, 1, -1], ids=["first byte", "second byte", "last byte"])
def test_a_changed_bit_of_an_expert_is_an_error(layout: ModelLayout, place: int) -> None:
    """In every expert of a layer, so that whichever is routed to is damaged."""
    write_checksums(layout)
    for tensor in layout.experts[:3]:
        for expert in range(tensor.n_expert):
            start, end = tensor.slice_of(expert)
            flip(layout.shards[tensor.shard].path, start + place if place >= 0 else end + place)
    llm = load(layout, read_checksums(layout))
    with pytest.raises(ReadError, match=r"expert \d+: its bytes are not those of the checksums"):
        llm.eval(PROMPTS[0][0])
    llm.close()


def test_every_expert_is_compared(layout: ModelLayout) -> None:
    write_checksums(layout)
    sums, arena = read_checksums(layout), Arena(layout.shards)
    reader = Verified(FileReader(layout.shards), layout, sums)

    def read(tensor_index: int, expert: int) -> None:
        tensor = layout.experts[tensor_index]
        start, end = tensor.slice_of(expert)
        offset, view = arena.expose(tensor.shard, start, end)
        reader.read(tensor.shard, offset, view, end - offset)

    for index, tensor in enumerate(layout.experts):
        for expert in range(tensor.n_expert):
            read(index, expert)
            middle = sum(tensor.slice_of(expert)) // 2
            flip(layout.shards[tensor.shard].path, middle)
            with pytest.raises(ReadError, match=rf"{tensor.name}, expert {expert}: "):
                read(index, expert)
            flip(layout.shards[tensor.shard].path, middle)
    reader.close()


def test_every_dense_weight_is_compared(layout: ModelLayout) -> None:
    write_checksums(layout)
    sums = read_checksums(layout)
    for damaged in [None, *layout.dense]:
        if damaged:
            flip(layout.shards[damaged.shard].path, damaged.offset + damaged.nbytes - 1)
        arena, reader = Arena(layout.shards), FileReader(layout.shards)
        read_dense(layout.dense, arena, reader)
        if damaged:
            with pytest.raises(ReadError, match=f"{damaged.name}: its bytes"):
                verify_dense(layout, layout.dense, arena, sums)
            flip(layout.shards[damaged.shard].path, damaged.offset + damaged.nbytes - 1)
        else:
            verify_dense(layout, layout.dense, arena, sums)
        reader.close()


def other_size(content: dict) -> None:
    content["sizes"][0] += 1


def other_tensors(content: dict) -> None:
    content["tensors"].popitem()


def other_format(content: dict) -> None:
    content["format"] = "sha1"


def short(content: dict) -> None:
    name, digits = content["tensors"].popitem()
    content["tensors"][name] = digits[:-1]


@pytest.mark.parametrize("change", [other_size, other_tensors, other_format, short])
def test_checksums_of_something_else_are_refused(
    layout: ModelLayout, change: Callable[[dict], None]
) -> None:
    path = write_checksums(layout)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="not the checksums of this model"):
        read_checksums(layout)


def test_checksums_that_are_missing_or_no_json(layout: ModelLayout) -> None:
    with pytest.raises(SettingsError, match="write the checksums with `routeahead checksum`"):
        read_checksums(layout)
    checksums_path(layout).write_text("{")
    with pytest.raises(ModelError, match="not the checksums of this model"):
        read_checksums(layout)


def test_a_model_that_ends_early_has_no_checksums(layout: ModelLayout) -> None:
    os.truncate(layout.shards[-1].path, layout.shards[-1].size - 100)
    with pytest.raises(ReadError, match="ends 100 bytes early"):
        write_checksums(layout)
    assert not checksums_path(layout).exists()


def test_without_xxhash_one_line_says_so(
    layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(SettingsError, match=r"need xxhash: install routeahead\[verify\]"):
        write_checksums(layout)


def test_the_setting_compares_and_the_verb_writes(layout: ModelLayout, tmp_path: Path) -> None:
    path = layout.shards[0].path
    with pytest.raises(SettingsError, match="write the checksums with `routeahead checksum`"):
        Llama(path, n_ctx=64, verify_reads=True)
    app = typer.Typer()
    app.command()(checksum)
    done = CliRunner().invoke(app, [str(path)])
    assert done.exit_code == 0 and "checksums written to" in done.stderr
    llm = Llama(path, n_ctx=64, cache_mb=0, n_threads=1, verify_reads=True)
    llm.eval([5, 6, 7])
    llm.close()
