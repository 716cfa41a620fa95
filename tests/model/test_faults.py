"""A fault anywhere inside a token: an exception, no token, and a next prompt that is right."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.faults import STOPS, CutShort, Fault, RaisingStop, interrupt_next_read
from support.library import PROMPTS, Library, evaluate
from support.readers import Failing, disk_error

import routeahead.engine.streamed_model as engine
from routeahead import Llama, ModelError, ReadError, SettingsError, StreamError
from routeahead.engine import budget, loading
from routeahead.experts.lanes import Lanes
from routeahead.experts.reader import FileReader, Reader
from routeahead.llamacpp import ggml, node_filter

Load = Callable[..., Llama]
NAME = "qwen3moe"

pytestmark = pytest.mark.fast


def raise_fault() -> int:
    raise Fault


def failing(fault: Callable[[], int], number: int) -> tuple[Callable[[Reader], Reader], list]:
    made: list[Failing] = []

    def wrap(inner: Reader) -> Reader:
        made.append(Failing(inner, lambda count: count == number, fault))
        return made[0]

    return wrap, made


def assert_recovers(llm: Llama, library: Library) -> None:
    """The context is as before the fault, and the next prompts are right."""
    for batches, expected in zip(PROMPTS, library.resident(NAME), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize(
    ("number", "cache_mb"), [(1, 0), (2, 0), (7, 0), (30, 0), (61, 0), (2, 64)]
)
def test_disk_error(
    load: Load, library: Library, overlap: bool, number: int, cache_mb: int
) -> None:
    wrap, made = failing(disk_error, number)
    poison = cache_mb == 0  # else a cache that outlived its pages would read zeros
    llm = load(NAME, cache_mb=cache_mb, overlap=overlap, wrap_reader=wrap, poison=poison)
    prompt, *tokens = PROMPTS[0]
    llm.eval(prompt)
    llm.phase = "decode"
    llm.eval(tokens[0])
    made[0].armed = True
    with pytest.raises(ReadError, match=r"layer \d+ expert \d+ \(\w+\): .*offset 8192"):
        llm.eval(tokens[1])
    made[0].armed = False
    assert llm.n_tokens == len(prompt) + 1

    # The same token again gives what it would have given, and so do new prompts.
    llm.eval(tokens[1])
    row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
    np.testing.assert_array_equal(row, library.resident(NAME)[0][2])
    assert_recovers(llm, library)


def test_error_of_a_later_projection_while_an_earlier_one_is_awaited(
    load: Load, library: Library
) -> None:
    """The down projection's read fails at once; the gate's, awaited first, takes its time."""
    armed: list[bool] = []

    class Uneven:
        def __init__(self, inner: Reader) -> None:
            self.inner = inner

        def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
            last = next(e for e in llm.layout.experts if offset < e.slice_of(e.n_expert - 1)[1])
            if armed and last.projection == "down":
                disk_error()
            time.sleep(0.02 if armed and last.projection == "gate" else 0)
            return self.inner.read(shard, offset, view, need)

        def close(self) -> None:
            self.inner.close()

    llm = load(NAME, cache_mb=0, io_threads=8)
    llm.source.lanes._reader = Uneven(llm.source.lanes._reader)
    llm.eval(PROMPTS[0][0])
    armed.append(True)
    with pytest.raises(ReadError, match=r"\(down\)"):
        llm.eval(PROMPTS[0][1])
    armed.clear()
    assert_recovers(llm, library)


def test_short_read_names_file_offset_and_expert(load: Load, tmp_path: Path) -> None:
    llm = load(NAME, cache_mb=0)
    reader = llm.streamed._reader
    assert isinstance(reader, FileReader)
    llm.eval(PROMPTS[0][0])
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(llm.layout.shards[0].path).read_bytes()[: 1 << 20])
    descriptor = os.open(cut, os.O_RDONLY)
    os.dup2(descriptor, reader._descriptors[0])  # the file shrinks under a running model
    os.close(descriptor)
    with pytest.raises(ReadError, match=r"layer \d+ expert .*model\.gguf: .*offset \d+.*ends"):
        for token in PROMPTS[0][1:]:
            llm.eval(token)


@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("call", [1, 5])
def test_exception_at_every_stop(
    load: Load,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    stop: str,
    error: type[BaseException],
    call: int,
) -> None:
    dropping = {"cache_mb": 1, "force_cache": True, "drop_cold_experts": 1e-9}
    llm = load(NAME, poison=True, **(dropping if stop == "final_weights" else {"cache_mb": 0}))
    prompt, *tokens = PROMPTS[0]
    llm.eval(prompt)
    llm.phase = "decode"
    stream = llm.streamed.stream
    raising = RaisingStop(getattr(stream, stop), error, call)
    monkeypatch.setattr(stream, stop, raising)
    with pytest.raises(error):
        llm.eval(tokens[0])
    assert raising.calls == call  # the graph ended there: no further stop
    assert llm.n_tokens == len(prompt)
    monkeypatch.undo()
    assert_recovers(llm, library)


def test_callback_cut_short_is_noticed(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ctypes drops an exception that escapes the callback: the filter must see it all the same."""

    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))
    monkeypatch.setattr(engine, "EvalCallback", CutShort)
    llm = load(NAME, cache_mb=0)
    prompt, *tokens = PROMPTS[0]
    llm.eval(prompt)
    llm.streamed.callback.armed = True
    with pytest.raises(KeyboardInterrupt):
        llm.eval(tokens[0])
    llm.streamed.callback.armed = False
    assert_recovers(llm, library)
    assert dropped == [Fault]


def test_interrupt_in_the_middle_of_a_token(load: Load, library: Library) -> None:
    """A real SIGINT that arrives while the evaluation thread waits for a lane."""
    llm = load(NAME, cache_mb=0)
    llm.eval(PROMPTS[0][0])
    interrupt_next_read(llm)
    with pytest.raises(KeyboardInterrupt):
        llm.eval(PROMPTS[0][1])
    assert_recovers(llm, library)


def test_interrupt_while_recovering(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C cuts the clean-up short: what it left undone is done before the next batch,
    or the cache would list experts whose reads were cancelled."""
    wrap, made = failing(disk_error, 2)
    llm = load(NAME, cache_mb=64, wrap_reader=wrap)
    prompt = PROMPTS[0][0]
    llm.eval(prompt[:2])
    made[0].armed = True

    def interrupted(lanes: Lanes) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Lanes, "cancel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.eval(PROMPTS[1][0] + prompt)
    made[0].armed = False
    assert llm.source and len(llm.source.cache) > 0  # which is not to be believed
    assert_recovers(llm, library)


def test_graph_without_announced_experts_is_refused(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An architecture whose products use ids that no top-k announced must not run."""
    llm = load(NAME, cache_mb=0)
    routed = llm.streamed.callback._stopped

    def forget(address: int) -> int:
        answer = routed(address)
        llm.streamed.callback._state[node_filter.ROUTED] = 0
        return answer

    monkeypatch.setattr(llm.streamed.callback, "_stopped", forget)
    with pytest.raises(StreamError, match="cannot be streamed"):
        llm.eval(PROMPTS[0][0])


# --- fallbacks, each forced once ---


def test_direct_io_refused(load: Load, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_open = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return plain_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match="page cache: O_DIRECT refused") as warned:
        llm = load(NAME, cache_mb=0)
    assert len(warned) == 1 and not llm.direct_io
    assert_recovers(llm, library)


def test_direct_io_that_reads_differently(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pread", lambda _d, length, _o: b"?" * length)
    with pytest.warns(UserWarning, match="reads differently"):
        llm = load(NAME, cache_mb=0)
    assert not llm.direct_io
    monkeypatch.undo()
    assert_recovers(llm, library)


def test_struct_layout_that_moved(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = ("op_params", ctypes.c_int32 * 14)
    fields = [shorter if f[0] == "op_params" else f for f in ggml.Tensor._fields_]
    moved = type("Tensor", (ctypes.Structure,), {"_fields_": fields})
    ggml.check_layout.cache_clear()
    monkeypatch.setattr(ggml, "Tensor", moved)
    with pytest.warns(UserWarning, match="cannot stream, so the whole model is loaded"):
        llm = load(NAME, cache_mb=0)
    assert llm.settings.resident and llm.source is None
    assert_recovers(llm, library)

    monkeypatch.setattr(loading, "available_bytes", lambda: 1000)
    with pytest.raises(StreamError, match="do not fit in the 0 MiB that are free"):
        load(NAME, cache_mb=0)
    monkeypatch.undo()
    ggml.check_layout.cache_clear()
    ggml.check_layout()


# --- settings ---


def test_cache_too_small_names_the_size_that_would_do(load: Load) -> None:
    with pytest.raises(SettingsError, match=r"give at least \d+"):
        load("mixed", cache_mb=1)
    llm = load("mixed", cache_mb=1, force_cache=True)
    assert llm.source and llm.source.cache.budget == 1 << 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_mb": -1}, "cache_mb is -1"),
        ({"io_threads": 0}, "io_threads is 0"),
        ({"dense": "swap"}, "dense is 'swap'"),
        ({"resident": True, "cache_mb": 5}, "resident streams nothing"),
        ({"force_cache": True}, "force_cache allows"),
    ],
)
def test_settings_that_contradict(load: Load, settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(NAME, **settings)


def test_prompt_longer_than_context(load: Load) -> None:
    llm = load(NAME, cache_mb=0)
    with pytest.raises(SettingsError, match="the prompt has 300 tokens and the context 256"):
        next(llm.generate([5] * 300))


def test_automatic_cache_without_room(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_bytes", lambda: 100 << 20)
    with pytest.raises(SettingsError, match="left for the expert cache"):
        load(NAME)


def test_llama_cpp_failure_is_one_error(tmp_path: Path, library: Library) -> None:
    """A file that passes the directory check but not llama.cpp's."""
    content = library.path(NAME).read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content.replace(b"blk.2.attn_q.weight", b"blk.2.attn_z.weight"))
    with pytest.raises(ModelError, match=r"llama\.cpp cannot load it: .*attn_q\.weight"):
        Llama(broken, n_ctx=64)


def test_interrupt_before_anything_is_recovered(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C at once: what a failed batch left behind is removed before the next one, and
    its logits are nobody's."""
    wrap, made = failing(disk_error, 2)
    llm = load(NAME, cache_mb=64, wrap_reader=wrap)
    prompt, token = PROMPTS[0][0], PROMPTS[0][1]
    first = next(llm.generate(prompt, temp=0))
    made[0].armed = True

    def interrupted(_: Llama) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Llama, "_undo", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.eval(PROMPTS[1][0] + token)
    monkeypatch.undo()
    made[0].armed = False
    assert next(llm.generate(prompt, temp=0)) == first
    assert_recovers(llm, library)
