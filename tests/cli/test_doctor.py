"""`routeahead doctor` and `bench --against-doctor`. What a forecast counts is tested, not times."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import Command
from support.hub import Hub
from support.library import Library

from routeahead.config import Settings
from routeahead.doctor import disk_probe, examination
from routeahead.doctor.engine_probe import Engine, EngineProbe, Streamed
from routeahead.doctor.examination import examine
from routeahead.doctor.forecast import Traffic, _by_probe, tokens_like
from routeahead.experts import slots
from routeahead.experts.arena import Pages
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.llamacpp.native_log import Buffers
from routeahead.models import DEFAULT_MODEL

REPO = "some/model-GGUF"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter probes: no test looks at what they find."""
    monkeypatch.setattr(disk_probe, "_ALONE_S", 0.1)
    monkeypatch.setattr(disk_probe, "_TOGETHER_S", 0.3)
    monkeypatch.setattr(disk_probe, "_SCRATCH", 16 << 20)


def examined(command: Command, *arguments: object) -> Any:
    done = command("doctor", *arguments, "--json", "-t", 1)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_it_says_of_a_model_here(command: Command) -> None:
    found = examined(command, DEFAULT_MODEL, "--cache-mb", 4)
    layout = read_layout(DEFAULT_MODEL)
    memory, told = found["memory"], found["forecast"]
    assert found["runs"] and found["arch"] == layout.arch
    assert memory["dense"] == layout.dense_bytes and memory["cache"] == 4 * MIB
    assert memory["kv"] == 3 * MIB  # 12 layers, 1024 tokens
    assert memory["share_of_experts"] == 4 * MIB / layout.expert_bytes
    assert 0.5 < found["traffic"]["hit_rate"] < 0.95 and "built-in" in found["traffic"]["text"]
    for name in ("decode", "prompt", "cold_start_s"):
        assert 0 < told[name]["low"] <= told[name]["value"] <= told[name]["high"]
    assert told["token_s"] >= told["stall_s"] >= 0
    misses = found["streamed"]["misses"]
    routed = len(layout.moe_layers) * layout.n_expert_used
    missed = sum(misses) / len(misses) / routed
    assert missed == pytest.approx(1 - found["traffic"]["hit_rate"], abs=0.02)


def test_what_it_prints(command: Command) -> None:
    done = command("doctor", "-t", 1)
    assert done.returncode == 0, done.stderr
    labels = [line[:18].strip() for line in done.stdout.splitlines()]
    for label in ("runs here", "KV cache", "expert cache", "disk", "decode", "first token"):
        assert label in labels
    assert "yes: everything has room" in done.stdout


def test_it_decodes_tokens_that_miss_what_the_runs_do(command: Command, tmp_path: Path) -> None:
    """Layer by layer what the recorded routing misses, where the cache is full and where not."""
    trace = tmp_path / "trace.csv"
    fed = ("--forced-tokens", "seed:3", "-n", 30, "-t", 1)
    assert command("run", DEFAULT_MODEL, *fed, "--route-trace", trace).returncode == 0
    for cache, full in ((2, True), (14, False)):
        settings = Settings(cache_mb=cache, replay_routing=trace)
        found = examine(DEFAULT_MODEL, settings, threads=1, warmup=4, tokens=20)
        routed, streamed = found.traffic, found.streamed
        assert routed and streamed and routed.full == full
        wanted = tokens_like(routed, found.layout, settings, len(streamed.misses)).sum(axis=1)
        assert list(streamed.misses) == wanted.tolist() and sum(wanted) > 0


def test_where_a_cache_fills_up_reads_land_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is given back is quick to have again, as a run's first reads are not."""
    given: list[Pages] = []
    monkeypatch.setattr(slots, "release", given.append)
    misses = np.ones((6, 12), np.int64)
    with EngineProbe(DEFAULT_MODEL, Settings(), threads=1, context=256) as probe:
        probe.without_misses()
        given.clear()
        found = probe.streamed(misses, cache=7 * MIB, full=False)
        assert found and found.misses == (12,) * 6
        assert not sum(pages.nbytes for pages in given)


def test_a_curve_is_scattered_over_layers() -> None:
    layout = read_layout(DEFAULT_MODEL)
    found = tokens_like(Traffic("a curve", 0.75), layout, Settings(), 100)
    layers, top_k = len(layout.moe_layers), layout.n_expert_used
    assert found.shape == (100, layers) and found.sum() == 100 * layers * top_k / 4
    assert found.min() == 0 and found.max() > 1


class TestBand:
    """Of a token that takes 10 ms and 1 ms more for each expert that it misses."""

    engine = Engine(0.0, 0, 0.010, 0.0, 0.0, Buffers({}, {}), 0, 0, 1)
    misses = (4, 8, 12, 16, 8, 4, 12, 16)

    def band(self, *factors: float) -> tuple[float, float]:
        seconds = [
            (0.010 + 0.001 * count) * factor
            for count, factor in zip(self.misses, factors * 8, strict=False)
        ]
        at, error = _by_probe(self.engine, Streamed(tuple(seconds), self.misses), 20)
        return at(0.5), error

    def test_misses_cost_what_they_did(self) -> None:
        assert self.band(1.0) == pytest.approx((0.020, 0.0))

    def test_it_is_as_wide_as_the_probe_was_unsteady(self) -> None:
        _, little = self.band(1.0, 1.1)
        _, much = self.band(1.0, 2.0)
        assert 0.05 < little < 0.2 and much > 4 * little


def test_a_device_that_is_not_here(command: Command) -> None:
    """Which part would go there is said, and no speed."""
    found = examined(command, DEFAULT_MODEL, "-ngl", 5)
    layout = read_layout(DEFAULT_MODEL)
    memory, device = found["memory"], found["device"]
    assert found["runs"] and found["forecast"] is None and device["devices"] == []
    assert device["layers"] == 5 and device["dense_bytes"] > 0
    copied = next(t.nbytes for t in layout.dense if t.name == "token_embd.weight")  # the output
    assert memory["dense"] + device["dense_bytes"] == layout.dense_bytes + copied
    assert memory["kv"] + device["kv"] == 3 * MIB and device["kv"] == 3 * MIB * 4 / 12
    done = command("doctor", "-ngl", "all")
    assert done.returncode == 0 and "13 of 13 layers" in done.stdout, done.stderr
    assert "not forecast: there is no device here" in done.stdout
    assert "tok/s" not in done.stdout
    nothing = examined(command, DEFAULT_MODEL, "-ngl", "auto")  # none here: nothing goes to one
    assert nothing["device"] is None and nothing["forecast"]


def test_of_a_model_on_the_hub_it_fetches_headers(
    command: Command, hub: Hub, large: Path, tmp_path: Path
) -> None:
    content = large.read_bytes()
    half = len(content) // 2
    hub.files[f"{REPO}/m-F16.gguf"] = content
    found = examined(command, f"{REPO}:F16", "--cache-mb", 20)
    assert found["runs"] and found["memory"]["dense"] == read_layout(large).dense_bytes
    assert found["streamed"] is None  # its bytes are not here
    assert hub.sent < half
    assert list((tmp_path / "models").iterdir()) == []  # nothing stays
    missing = command("doctor", f"{REPO}:Q8_0")
    assert missing.returncode == 1 and "no such quantisation" in missing.stderr


def test_what_is_no_gguf_on_the_hub(command: Command, hub: Hub) -> None:
    hub.files[f"{REPO}/m-Q8_0.gguf"] = b"GGUF" + bytes(1000)
    done = command("doctor", f"{REPO}:Q8_0")
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    assert "m-Q8_0.gguf" in done.stderr


def test_a_model_that_has_no_room(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "available_bytes", lambda: 100 * MIB)
    done = command("doctor")
    assert done.returncode == 1
    assert "no: not even the dense weights" in done.stdout and "decode" not in done.stdout


def test_what_it_refuses(command: Command, library: Library, tmp_path: Path) -> None:
    for arguments, told in {
        ("missing.gguf",): "No such file",
        (tmp_path,): "is a folder",
        ("--replay-routing", tmp_path / "none.csv"): "No such file",
        ("some/where/else.gguf",): "No such file",
        ("some/model-GGUF",): "if it is a model of the hub, write hf:some/model-GGUF",
    }.items():
        done = command("doctor", *arguments)
        assert done.returncode == 1 and told in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_bench_against_it_has_the_same_hits(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast replays the routing that the run follows, so its hits are the run's."""
    trace, record = tmp_path / "trace.csv", tmp_path / "bench.json"
    fed = ("--forced-tokens", "seed:3", "-n", 30, "-t", 1)
    assert command("run", DEFAULT_MODEL, *fed, "--route-trace", trace).returncode == 0
    done = command(
        "bench", DEFAULT_MODEL, "--cell", f"small:--cache-mb 2 --replay-routing {trace}",
        "--cell", f"larger:--cache-mb 5 --replay-routing {trace}", "--against-doctor",
        "--tokens", 12, "--warmup", 8, "--passes", 1, "-t", 1, "--json", record,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(record.read_text())
    for summary in content["summary"]:
        told = content["doctor"][summary["name"]]["traffic"]["hit_rate"]
        assert 0 < told < 1 and told == pytest.approx(summary["figures"]["hit_rate"]["median"])
    assert "against the doctor" in done.stdout and "it lay" in done.stdout


def test_a_cell_that_it_has_no_model_of(command: Command) -> None:
    for cell, told in {
        "a:--prefetch 1": "no model of prefetch",
        "a:other.py": "knows `routeahead run` alone",
        "a:-c 100": "-c",
    }.items():
        done = command("bench", "--cell", cell, "--against-doctor", "--passes", 1)
        assert done.returncode == 1 and told in done.stderr, done.stderr
    limited = command("bench", "--cell", "a:", "--against-doctor", "--memory-limit", 900)
    assert limited.returncode == 1 and "knows of no --memory-limit" in limited.stderr


def test_what_a_killed_doctor_left_is_deleted(
    command: Command, hub: Hub, tmp_path: Path, large: Path
) -> None:
    hub.files[f"{REPO}/m-F16.gguf"] = large.read_bytes()
    left, other = (tmp_path / "models" / name for name in (".doctor-left", ".doctor-running"))
    for folder in (left, other):
        folder.mkdir(parents=True)
        (folder / "scratch").write_bytes(b"x")
    os.utime(left, (0, 0))
    examined(command, f"{REPO}:F16", "--cache-mb", 20)
    assert list((tmp_path / "models").iterdir()) == [other]
