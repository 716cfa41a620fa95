"""What is special where dense layers lie on a device. Not collected by itself: `test_device.py`
runs it in a process that has one, with all layers there unless a check says otherwise.

References are resident runs with the same layers on the device and the same batches.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import models
from support.library import CONTEXT, PROMPTS, THREADS, Library, evaluate
from support.readers import Delayed
from support.rpc_device import DEVICE

from routeahead import Llama, Settings
from routeahead.cli.app import app
from routeahead.doctor.examination import examine
from routeahead.engine.streamed_model import Hooks
from routeahead.errors import ReadError, SettingsError
from routeahead.llamacpp import ggml, tensor_values
from routeahead.llamacpp.devices import devices
from routeahead.llamacpp.node_filter import ROUTED

Load = Callable[..., Llama]
NAME = "qwen3moe"
BLOCKS = models.FIXTURES[NAME].layers


def on_host(llm: Llama, name: str) -> bool:
    assert llm.streamed
    return tensor_values.on_host(ggml.tensor_at(llm.streamed._placement.tensors[name]))


def test_what_goes_where(load: Load, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights and KV cache of four blocks on the device, every expert and two blocks in memory."""
    llm = load(NAME, cache_mb=0, n_gpu_layers=5, verbose=True)
    assert llm.streamed and llm.offload.layers == 5 and llm.offload.first == 2
    log = capfd.readouterr().err
    assert f"offloaded 5/{BLOCKS + 1} layers to GPU" in log
    assert re.search(rf"{devices()[0].name}\S* KV buffer size", log) and re.search(
        r"CPU KV buffer size", log
    )
    placed = llm.streamed._placement.tensors
    assert {name for name in placed if "exps" in name} == {e.name for e in llm.layout.experts}
    assert "blk.1.attn_q.weight" in placed and "blk.2.attn_q.weight" not in placed
    kept = llm.offload.on_host(llm.layout)
    assert {t.name for t in kept} == {t for t in placed if "exps" not in t} | {"token_embd.weight"}
    dense = llm.offload.device_bytes(llm.layout) + llm.offload.host_bytes(llm.layout)
    assert dense == llm.layout.dense_bytes


def test_doctor_measures_on_the_device(library: Library) -> None:
    """Memory of host and device apart, as llama.cpp allocated it, and tokens with layers there."""
    path = library.path(NAME)
    there = examine(path, Settings(n_gpu_layers=4, cache_mb=1), threads=1, context=CONTEXT)
    here = examine(path, Settings(n_gpu_layers=0, cache_mb=1), threads=1, context=CONTEXT)
    assert here.device is None and there.device and there.forecast and there.engine
    assert [device.name for device in there.device.devices] == [devices()[0].name]
    buffers = there.engine.buffers
    assert there.device.kv == buffers.device["KV"] == here.memory.kv // 2  # of six blocks, three
    assert there.memory.kv == buffers.host["KV"] == here.memory.kv // 2
    assert there.device.compute >= buffers.device["compute"] > 0
    assert there.device.dense + there.memory.dense == here.memory.dense


@pytest.mark.parametrize("layers", [0, 1, 4, "all", "auto", -1])
def test_the_same_as_resident_with_the_same_split(
    load: Load, library: Library, layers: int | str
) -> None:
    resident = load(NAME, resident=True, n_gpu_layers=layers)
    expected = evaluate(resident, PROMPTS[0])
    streamed = load(NAME, cache_mb=0, n_gpu_layers=layers, poison=True, wrap_reader=Delayed)
    np.testing.assert_array_equal(evaluate(streamed, PROMPTS[0]), expected)
    assert streamed.offload == resident.offload
    if os.environ.get(DEVICE) != "vulkan":  # the device's kernels are the CPU's
        np.testing.assert_array_equal(expected, library.resident(NAME)[0])


def test_lossless_runs_do_not_stop_the_device(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is fetched from there: ids are read from the copy that llama.cpp makes anyway."""
    fetched: list[int] = []
    inner = tensor_values._fetch

    def noting(tensor: ggml.Tensor, nbytes: int) -> tensor_values.Bytes:
        fetched.append(nbytes)
        return inner(tensor, nbytes)

    monkeypatch.setattr(tensor_values, "_fetch", noting)
    evaluate(load(NAME, cache_mb=0), PROMPTS[1])
    assert not fetched
    evaluate(load(NAME, cache_mb=8, predict_prefetch=True), PROMPTS[1])
    assert fetched


@pytest.mark.parametrize("layers", [1, 2])
def test_ubatches_of_a_model_with_few_layers(tmp_path: Path, layers: int) -> None:
    """The copy of a ubatch's only top-k has the name and the address of the last ubatch's: it is
    read anew all the same."""
    path = models.write(tmp_path / "m.gguf", models.Spec(NAME, layers=layers))
    prompt = np.random.default_rng(5).integers(3, 259, size=40).tolist()
    given = {"n_ctx": CONTEXT, "n_batch": 40, "n_ubatch": 8, "n_threads": THREADS}
    found = []
    for settings in ({"resident": True}, {"cache_mb": 0, "_hooks": Hooks(poison=True)}):
        llm = Llama(path, **given, **settings)
        found.append(evaluate(llm, [prompt, [7], [9]]))
        llm.close()
    np.testing.assert_array_equal(*found)


def test_a_copy_of_an_older_routing_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate: a product whose ids were not announced ends the graph."""
    llm = load(NAME, cache_mb=0)
    callback = llm.streamed.callback
    inner = type(callback)._route

    def stale(self: object, name: bytes, tensor: object, address: int) -> None:
        inner(self, name, tensor, address)
        self._state[ROUTED] = 1 << 20

    monkeypatch.setattr(type(callback), "_route", stale)
    with pytest.raises(Exception, match="uses experts that no top-k announced"):
        llm.eval([5, 6, 7])
    monkeypatch.undo()
    llm.reset()
    llm.eval([5, 6, 7])


def test_experts_are_not_copied_to_the_device(load: Load) -> None:
    with pytest.raises(SettingsError, match=r"^op_offload copies experts to the device"):
        load(NAME, op_offload=True)
    with pytest.raises(SettingsError, match=r"^op_offload copies experts to the device"):
        load(NAME, op_offload=True, n_gpu_layers=0)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_disk_error_in_any_layer(load: Load, library: Library, block: int) -> None:
    """llama.cpp goes on to the later parts of a graph that was ended, and runs a node of each: its
    ids must be those of experts."""
    broken: list[range] = []

    class Failing(Delayed):
        def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
            if any(offset in where for where in broken):
                raise ReadError(f"broken at {offset}")
            return super().read(shard, offset, view, need)

    llm = load(NAME, cache_mb=0, poison=True, wrap_reader=Failing)
    tensor = next(e for e in llm.layout.experts if e.layer == block)
    broken.append(range(tensor.offset, tensor.offset + tensor.n_expert * tensor.expert_bytes))
    for _ in range(2):
        with pytest.raises(ReadError, match="broken at"):
            llm.eval(PROMPTS[0][0])
    broken.clear()
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), library.resident(NAME)[0])


def test_the_report_has_both_memories(
    library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = library.path(NAME), tmp_path / "run.json"
    arguments = ["run", str(path), "-p", "x", "--raw", "-n", "4", "-ngl", "3", "--cache-mb", "1"]
    app([*arguments, "--force-cache", "--report", str(report)], standalone_mode=False)
    told = capsys.readouterr()
    assert "moe-device: 3 of 7 layers (blocks 4-5 and the output)" in told.out + told.err
    found = json.loads(report.read_text())["device"]
    assert found["layers"] == 3 and found["total_layers"] == BLOCKS + 1
    assert found["dense_bytes"] > 0 and found["host_dense_bytes"] > 0
    assert found["devices"][0]["free_bytes"] > 0


def test_inspect_says_what_goes_where(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    app(["inspect", str(library.path(NAME)), "-ngl", "auto"], standalone_mode=False)
    told = capsys.readouterr().out
    assert f"{BLOCKS + 1} of {BLOCKS + 1} layers (blocks 0-{BLOCKS - 1} and the output)" in told
    assert devices()[0].name in told and "KV cache" in told
