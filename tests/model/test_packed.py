"""A packed file: the same bytes in another order, the same tokens, and a read an expert."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from support import models
from support.library import PROMPTS, Library, evaluate, with_budget
from support.readers import WAYS, Delayed, Failing, disk_error

from routeahead import Llama, ModelError, ReadError, SettingsError
from routeahead.engine import packing
from routeahead.engine.checksums import read_checksums, write_checksums
from routeahead.engine.fingerprint import fingerprint
from routeahead.engine.packing import write_packed
from routeahead.experts.layout import BLOCK
from routeahead.experts.load import Load as Loading
from routeahead.experts.packed import ARCHITECTURE, FINGERPRINT, VERSION, WAS
from routeahead.experts.reader import Reader
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.llamacpp.gguf_metadata import read_header
from routeahead.telemetry.io_trace import read_io_trace, report
from routeahead.telemetry.recorder import Outputs

Load = Callable[..., Llama]
NAME = "qwen3moe"
ADDED = {"general.alignment", VERSION, WAS, FINGERPRINT}


def assert_same(llm: Llama, library: Library, name: str = NAME) -> None:
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


# --- the file ---


@pytest.mark.parametrize(
    ("name", "shards"), [*((name, 1) for name in models.FIXTURES), (NAME, 2), (NAME, 4)]
)
def test_every_weight_has_its_bytes(library: Library, name: str, shards: int) -> None:
    before = read_layout(library.path(name, shards))
    after = read_layout(library.packed(name, shards))
    (packed,) = [shard.path.read_bytes() for shard in after.shards]
    plain = [shard.path.read_bytes() for shard in before.shards]
    assert after.packed and not before.packed and after.arch == before.arch
    dense = {tensor.name: tensor for tensor in after.dense}
    assert dense.keys() == {tensor.name for tensor in before.dense}
    for old in before.dense:
        new = dense[old.name]
        assert (new.quant, new.shape) == (old.quant, old.shape)
        assert packed[new.offset : new.end] == plain[old.shard][old.offset : old.end]
    experts = {tensor.name: tensor for tensor in after.experts}
    assert experts.keys() == {tensor.name for tensor in before.experts}
    read: list[tuple[int, int]] = []
    for old in before.experts:
        new = experts[old.name]
        assert (new.quant, new.n_expert) == (old.quant, old.n_expert)
        for expert in range(old.n_expert):
            start, end = old.slice_of(expert)
            read.append(new.slice_of(expert))
            assert packed[slice(*read[-1])] == plain[old.shard][start:end]
    ranges = sorted(read + [(tensor.offset, tensor.end) for tensor in after.dense])
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    assert len(after.pieces) == len(after.moe_layers)


@pytest.mark.parametrize("nbytes", [BLOCK, 20_000, 70_000])
def test_a_layer_is_written_in_pieces(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Of an expert, of several, of some and a rest; elsewhere all fit in one."""
    monkeypatch.setattr(packing, "_PIECE", nbytes)
    write_packed(library.path(NAME, 2), tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == library.packed(NAME, 2).read_bytes()


@pytest.mark.parametrize(("name", "shards"), [("gemma4", 1), (NAME, 2)])
def test_the_directory_is_the_models(library: Library, name: str, shards: int) -> None:
    """As another reader of GGUF files sees it, and the metadata byte by byte."""
    path = library.packed(name, shards)
    first = read_layout(library.path(name, shards)).shards[0].path
    shards_of = [gguf.GGUFReader(shard.path) for shard in read_layout(first).shards]
    known = {t.name: (t.tensor_type, *t.shape) for one in shards_of for t in one.tensors}
    found = gguf.GGUFReader(path)
    assert {t.name: (t.tensor_type, *t.shape) for t in found.tensors} == known
    assert all(t.data_offset % BLOCK == 0 for t in found.tensors)
    old, new = read_header(first).keys, read_header(path).keys
    kept = {key: value for key, value in old.items() if not key.startswith("split.")}
    assert new.keys() - kept.keys() == ADDED
    assert [key for key in kept if kept[key] != new[key]] == [ARCHITECTURE]


@pytest.mark.fast
def test_other_programs_refuse_it(library: Library, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="Failed to load model"):
        llama_cpp.Llama(str(library.packed(NAME)), verbose=True)
    assert "unknown model architecture: 'routeahead-packed-qwen3moe'" in capfd.readouterr().err


@pytest.mark.fast
def test_it_stands_for_the_original(library: Library, load: Load) -> None:
    """Calibrated routers of the original are for it, too, and clients see the architecture."""
    before, after = read_layout(library.path(NAME)), read_layout(library.packed(NAME))
    assert fingerprint(before.loaded()) == fingerprint(after.loaded())
    llm = load(NAME, packed=True, cache_mb=0)
    assert llm.metadata[ARCHITECTURE] == "qwen3moe"


# --- the same tokens ---

VARIATIONS = {"poison": {"poison": True}, **WAYS}


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("name", models.FIXTURES)
def test_same_logits_and_a_read_an_expert(
    load: Load, library: Library, name: str, variation: str
) -> None:
    llm = load(name, packed=True, cache_mb=0, **VARIATIONS[variation])
    assert llm.source
    llm.source.cache.budget = llm.layout.token_bytes()
    assert_same(llm, library, name)
    decode = llm.counters.decode
    assert decode.reads == decode.misses > 0 and llm.source.cache.evictions > 0


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("name", ["gemma4", "mixed"])
def test_same_logits_without_a_cache_and_with_everything(
    load: Load, library: Library, name: str, share: float
) -> None:
    llm = load(name, packed=True, cache_mb=0, poison=True)
    assert llm.source
    llm.source.cache.budget = int(llm.layout.expert_bytes * share)
    assert_same(llm, library, name)
    assert llm.counters.decode.reads == llm.counters.decode.misses > 0


def test_whole_blocks_land_in_place(tmp_path: Path) -> None:
    """Experts whose bytes are a multiple of a block are not moved after the read."""
    spec = models.Spec("qwen3moe", width=64, experts=8, expert_width=32, quant="F16")
    plain, target = models.write(tmp_path / "plain.gguf", spec), tmp_path / "packed.gguf"
    write_packed(plain, target)
    shared: dict[str, Any] = {"n_ctx": 64, "n_batch": 64, "n_threads": 1}
    llm = Llama(target, cache_mb=0, **shared)
    assert llm.source
    for of in llm.source.table.layers.values():
        (place,) = of.places
        assert place.stride % BLOCK == 0
        assert all(of.pool.target(place, expert, 2).shift == 0 for expert in range(8))
    resident = Llama(plain, resident=True, **shared)
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), evaluate(resident, PROMPTS[0]))
    llm.close()
    resident.close()


@pytest.mark.fast
@pytest.mark.parametrize("serial", [False, True])
def test_a_missing_wait_is_seen(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch, serial: bool
) -> None:
    """Without the one wait for an expert, delayed reads give other logits."""
    llm = load(NAME, packed=True, cache_mb=0, overlap=not serial, wrap_reader=Delayed)
    source = llm.source
    assert source
    assert_same(llm, library)
    wait = source.wait

    def forgetful(load_: Loading, projection: str | None = None) -> None:
        if projection != (None if serial else "gate"):
            wait(load_, projection)

    monkeypatch.setattr(source, "wait", forgetful)
    with pytest.raises(AssertionError):
        assert_same(llm, library)


@pytest.mark.fast
def test_a_read_error_names_the_expert_and_leaves_nothing(load: Load, library: Library) -> None:
    made: list[Failing] = []

    def wrap(inner: Reader) -> Reader:
        made.append(Failing(inner, lambda count: count == 7, disk_error))
        return made[0]

    llm = load(NAME, packed=True, cache_mb=0, wrap_reader=wrap)
    made[0].armed = True
    with pytest.raises(ReadError, match=r"layer \d+ expert \d+ \(gate\+up\+down\)"):
        evaluate(llm, PROMPTS[0])
    made[0].armed = False
    assert_same(llm, library)


@pytest.mark.parametrize(
    "settings",
    [
        {"prefetch": 3},
        {"predict_prefetch": True, "predict_spec_max": 99},
        {"fill_cache": True},
        {"fill_cache": True, "prefetch": 3},
    ],
    ids=str,
)
def test_guesses_and_filling_change_nothing(
    load: Load,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, Any],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llm = with_budget(load, NAME, 0.3, packed=True, poison=True, wrap_reader=Delayed, **settings)
    source = llm.source
    assert source
    source.begin()  # lays the slots out for that budget, and fills them
    deadline = time.monotonic() + 30
    while source.lanes.idle_queued and time.monotonic() < deadline:
        time.sleep(0.005)
    assert_same(llm, library)
    counts = source.filling.counts if source.filling else source.prefetch
    assert 0 < counts.useful <= counts.completed <= counts.issued
    assert counts.landed <= counts.completed


@pytest.mark.parametrize("depth", [1, 2])
def test_route_ahead_commits_and_reads_the_same(load: Load, tmp_path: Path, depth: int) -> None:
    """As from the original, where each expert is three reads."""
    logits, figures = [], []
    for packed in (False, True):
        trace = tmp_path / f"{packed}.csv"
        llm = with_budget(
            load, NAME, 0.25, packed=packed, poison=True, wrap_reader=Delayed, route_ahead=depth,
            outputs=Outputs(io_trace=trace),
        )  # fmt: skip
        logits.append([evaluate(llm, batches) for batches in PROMPTS])
        assert llm.source
        early, decode = llm.source.prefetch, llm.counters.decode
        assert 0 < early.useful == early.issued
        assert early.landed <= early.completed <= early.issued
        llm.close()
        columns = read_io_trace(trace)
        figures.append((report(columns), decode.reads, early.issued))
        assert set(columns["projection"]) == (
            {"gate+up+down"} if packed else {"gate", "up", "down"}
        )
    for plain, of_packed in zip(*logits, strict=True):
        np.testing.assert_array_equal(plain, of_packed)
    (before, reads, issued), (after, fewer, again) = figures
    assert issued == again and reads == 3 * fewer and after.early_again == 0
    assert before.kinds["committed"] == 3 * after.kinds["committed"]
    assert after.kinds["committed"] == issued


@pytest.mark.fast
def test_a_copy_of_it_is_loaded_anew(load: Load) -> None:
    llm = load(NAME, packed=True, cache_mb=0)
    again = pickle.loads(pickle.dumps(llm))
    np.testing.assert_array_equal(evaluate(again, PROMPTS[1]), evaluate(llm, PROMPTS[1]))
    again.close()


@pytest.mark.fast
def test_what_else_is_overridden_stays_so(load: Load) -> None:
    logits = []
    for settings in ({"resident": True}, {"packed": True, "cache_mb": 0}):
        llm = load(NAME, n_expert_used=2, kv_overrides={"general.name": "mine"}, **settings)
        logits.append(evaluate(llm, PROMPTS[1]))
    np.testing.assert_array_equal(*logits)
    assert not np.array_equal(logits[0], evaluate(load(NAME, resident=True), PROMPTS[1]))


# --- checksums ---


@pytest.fixture
def packed_copy(library: Library, tmp_path: Path) -> Path:
    return Path(shutil.copy(library.packed(NAME), tmp_path))


def test_each_projection_of_a_read_is_compared(packed_copy: Path, library: Library) -> None:
    layout = read_layout(packed_copy)
    write_checksums(layout)
    plain = read_layout(library.path(NAME))
    write_checksums(plain)
    assert read_checksums(layout) == read_checksums(plain)
    settings: dict[str, Any] = {"n_ctx": 256, "n_batch": 256, "n_threads": 1, "cache_mb": 0}
    llm = Llama(packed_copy, verify_reads=True, **settings)
    assert_same(llm, library)
    llm.close()
    sound = packed_copy.read_bytes()
    for tensor in layout.experts[:3]:
        damaged = bytearray(sound)
        for expert in range(tensor.n_expert):
            damaged[tensor.slice_of(expert)[1] - 1] ^= 1
        packed_copy.write_bytes(damaged)
        llm = Llama(packed_copy, verify_reads=True, **settings)
        with pytest.raises(ReadError, match=rf"{tensor.name}, expert \d+: its bytes are not"):
            llm.eval(PROMPTS[0][0])
        llm.close()


# --- what is refused ---


@pytest.mark.fast
def test_it_is_not_loaded_whole(library: Library) -> None:
    path = library.packed(NAME)
    with pytest.raises(SettingsError, match=r"resident: llama\.cpp cannot load a packed file"):
        Llama(path, resident=True)
    assert Llama(path, vocab_only=True).tokenize(b"a")


def test_of_a_large_expert_each_projection_is_a_read(
    load: Load, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the first one computes while the others are read; it is not worth a packed file."""
    path = library.packed(NAME)
    monkeypatch.setattr("routeahead.experts.layout.AT_ONCE", 100)
    llm = with_budget(load, NAME, 0.25, packed=True, poison=True, wrap_reader=Delayed)
    for batches, expected in zip(PROMPTS, library.resident(NAME), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    assert llm.layout.packed and llm.layout.shards[0].path == path
    assert llm.counters.decode.reads == 3 * llm.counters.decode.misses > 0
    monkeypatch.setattr("routeahead.engine.packing.AT_ONCE", 100)
    with pytest.raises(ModelError, match="one read of all of it is slower"):
        write_packed(library.path(NAME), tmp_path / "out.gguf")


@pytest.mark.fast
def test_a_model_that_changes_meanwhile_is_not_packed(library: Library, tmp_path: Path) -> None:
    path, target = tmp_path / "in.gguf", tmp_path / "out.gguf"
    shutil.copy(library.path(NAME), path)
    with pytest.raises(ReadError, match=r"in\.gguf: changed while it was read; pack it again"):
        write_packed(path, target, progress=lambda *_: os.utime(path, ns=(1, 1)))
    assert not target.exists() and not target.with_name("out.gguf.partial").exists()


@pytest.mark.fast
def test_what_cannot_be_packed(library: Library, tmp_path: Path) -> None:
    path, target = library.path(NAME), tmp_path / "out.gguf"
    with pytest.raises(ModelError, match="is packed already"):
        write_packed(library.packed(NAME), target)
    with pytest.raises(SettingsError, match="is a file of the model"):
        write_packed(path, path)
    for taken in (tmp_path / "there", tmp_path / "link"):
        taken.symlink_to("nowhere") if taken.name == "link" else taken.write_text("mine")
        with pytest.raises(SettingsError, match="exists: give another name, or delete it"):
            write_packed(path, taken)
    assert (tmp_path / "there").read_text() == "mine"
    pipe = tmp_path / "out.gguf.partial"
    os.mkfifo(pipe)
    with pytest.raises(SettingsError, match=r"\.partial: cannot be written: No such device"):
        write_packed(path, target)
    pipe.unlink()
    with pytest.raises(SettingsError, match=r"cannot be written: there is no folder .*/no folder$"):
        write_packed(path, tmp_path / "no folder" / "out.gguf")
    with pytest.raises(SettingsError, match="is the name of a part of a split model"):
        write_packed(path, tmp_path / "out-00001-of-00002.gguf")
    dense = models.write(tmp_path / "dense.gguf", replace(models.FIXTURES[NAME], dense_layers=6))
    with pytest.raises(ModelError, match=r"has no experts \(qwen3moe\): nothing to pack"):
        write_packed(dense, target)
    assert not target.exists()


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nothing_half_written_is_left(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = library.path(NAME), tmp_path / "out.gguf"

    def interrupt(done: int, total: int) -> None:
        assert part.stat().st_size <= total
        if done > total // 2:
            raise KeyboardInterrupt

    part = tmp_path / "out.gguf.partial"
    with pytest.raises(KeyboardInterrupt):
        write_packed(path, target, progress=interrupt)
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as changed:
        changed.setattr(
            shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 1 << 20)
        )
        with pytest.raises(SettingsError, match=r"\d MiB are to be written, 64 more stay"):
            write_packed(path, target)
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as changed:
        changed.setattr(os, "fsync", full_disk)
        with pytest.raises(SettingsError, match=r"out\.gguf: cannot be written: No space left"):
            write_packed(path, target)
    assert not list(tmp_path.iterdir())
    part.write_bytes(b"of a killed run" * 1_000_000)

    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(SettingsError, match="another process writes it"):
            write_packed(path, target)

    write_packed(path, target, progress=meanwhile)
    assert [one.name for one in tmp_path.iterdir()] == ["out.gguf"]
    assert target.read_bytes() == library.packed(NAME).read_bytes()


def changed(path: Path, before: bytes, after: bytes) -> Path:
    data = path.read_bytes()
    assert len(before) == len(after) and data.count(before) == 1
    path.write_bytes(data.replace(before, after))
    return path


@pytest.mark.fast
def test_another_format_and_damage_are_refused(packed_copy: Path) -> None:
    version = VERSION.encode() + b"\x04\0\0\0"
    original = packed_copy.read_bytes()
    changed(packed_copy, version + b"\1", version + b"\2")
    with pytest.raises(ModelError, match="packed in format 2, and this routeahead reads 1"):
        read_layout(packed_copy)
    packed_copy.write_bytes(original)
    changed(packed_copy, VERSION.encode() + b"\x04", b"routeahead.kcap\x04")
    with pytest.raises(ModelError, match="packed in format None"):
        read_layout(packed_copy)
    packed_copy.write_bytes(original)
    changed(packed_copy, b"routeahead-packed-qwen3moe", b"routeahead-packed-qwen2moe")
    with pytest.raises(ModelError, match="'qwen3moe': damaged; pack the original anew"):
        read_layout(packed_copy)
    packed_copy.write_bytes(original)
    changed(packed_copy, b"blk.0.ffn_up_exps.weight", b"blk.9.ffn_up_exps.weight")
    with pytest.raises(ModelError, match="of layer 0 are not side by side"):
        read_layout(packed_copy)
