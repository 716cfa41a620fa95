"""`routeahead pull`, `list` and `rm`, against a hub of this machine."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import pytest
from support.commands import Command
from support.hub import Hub
from support.library import Library

from routeahead.models import DEFAULT_MODEL

REPO = "some/model-GGUF"
BYTES = random.Random(1).randbytes(300_000)


@pytest.fixture(autouse=True)
def two_models(hub: Hub) -> None:
    hub.files |= {f"{REPO}/m-Q4_K_M.gguf": BYTES, f"{REPO}/m-Q8_0.gguf": BYTES[::-1]}


@pytest.fixture
def models(tmp_path: Path, hub: Hub) -> Path:
    return tmp_path / "models" / REPO


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()} - {".pull.lock"}


def test_pull_list_rm(command: Command, hub: Hub, models: Path) -> None:
    done = command("pull", f"{REPO}:Q4_K_M")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{models / 'm-Q4_K_M.gguf'}\n"
    assert (models / "m-Q4_K_M.gguf").read_bytes() == BYTES
    assert names(models) == {"m-Q4_K_M.gguf"}
    listed = json.loads(command("list", "--json").stdout)
    assert listed["models"] == [
        {"name": f"{REPO}:Q4_K_M", "bytes": len(BYTES), "path": str(models / "m-Q4_K_M.gguf")}
    ]
    assert f"{REPO}:Q4_K_M" in command("list").stdout
    gone = command("rm", f"{REPO}:Q4_K_M")
    assert gone.returncode == 0 and f"deleted {REPO}:Q4_K_M" in gone.stdout
    assert not models.parent.exists()
    again = command("rm", f"{REPO}:Q4_K_M")
    assert again.returncode == 1 and "not among the models here" in again.stderr
    assert "no models in" in command("list").stdout


def test_a_second_pull_compares_and_fetches_nothing(
    command: Command, hub: Hub, models: Path
) -> None:
    assert command("pull", f"{REPO}:Q8_0").returncode == 0
    sent = hub.sent
    assert command("pull", f"hf:{REPO}:q8_0").returncode == 0
    assert hub.sent == sent
    place = models / "m-Q8_0.gguf"
    place.write_bytes(BYTES)  # as long, and something else
    assert command("pull", f"{REPO}:Q8_0").returncode == 0
    assert place.read_bytes() == BYTES[::-1]


def test_all_shards_come(command: Command, hub: Hub, models: Path, library: Library) -> None:
    first = library.path("qwen3moe", 2)
    shards = sorted(first.parent.glob(first.name.replace("00001", "*")))
    assert len(shards) == 2
    for index, shard in enumerate(shards, 1):
        name = f"{REPO}/F32/m-F32-{index:05d}-of-00002.gguf"
        hub.files[name] = shard.read_bytes()
    done = command("pull", f"{REPO}:F32")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == models / "F32" / "m-F32-00001-of-00002.gguf"
    assert [p.read_bytes() for p in sorted((models / "F32").glob("*.gguf"))] == [
        shard.read_bytes() for shard in shards
    ]
    told = command("inspect", f"hf:{REPO}:F32")
    assert told.returncode == 0 and "2 file(s)" in told.stdout
    assert command("rm", f"{REPO}:F32").returncode == 0
    assert not models.exists()


def test_a_connection_that_breaks_is_taken_up_again(
    command: Command, hub: Hub, models: Path
) -> None:
    hub.files[f"{REPO}/m-Q4_K_M.gguf"] = content = random.Random(3).randbytes(24 << 20)
    hub.cut = [15 << 20]
    done = command("pull", f"{REPO}:Q4_K_M")
    assert done.returncode == 0, done.stderr
    assert (models / "m-Q4_K_M.gguf").read_bytes() == content
    kept = huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE  # it writes pieces of this size
    assert [one.range for one in hub.gets()] == ["", f"bytes={kept}-"]


def test_a_killed_pull_goes_on_where_it_was(command: Command, hub: Hub, models: Path) -> None:
    hub.files[f"{REPO}/m-Q4_K_M.gguf"] = content = random.Random(2).randbytes(60 << 20)
    hub.pause_s = 0.001
    line = [sys.executable, "-m", "routeahead.cli.main", "pull", f"{REPO}:Q4_K_M"]
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    while not any(part.stat().st_size > 1 << 20 for part in models.glob(".*.part")):
        assert process.poll() is None
        time.sleep(0.01)
    other = command("pull", f"{REPO}:Q8_0")
    assert other.returncode == 1 and "another process pulls into it" in other.stderr
    process.kill()
    process.wait()
    (part,) = models.glob(".*.part")
    begun = part.stat().st_size
    assert 1 << 20 < begun < len(content)
    assert names(models) == {part.name}
    unfinished = json.loads(command("list", "--json").stdout)["unfinished"]
    assert unfinished == [{"path": str(models / "m-Q4_K_M.gguf"), "bytes": begun}]
    hub.pause_s = 0
    done = command("pull", f"{REPO}:Q4_K_M")
    assert done.returncode == 0, done.stderr
    assert hub.gets()[-1].range == f"bytes={begun}-"
    assert (models / "m-Q4_K_M.gguf").read_bytes() == content
    assert names(models) == {"m-Q4_K_M.gguf"}


def test_what_an_interrupted_pull_left_can_be_deleted(
    command: Command, hub: Hub, models: Path
) -> None:
    models.mkdir(parents=True)
    (models / f".m-Q8_0.gguf.{'0' * 16}.part").write_bytes(b"begun")
    done = command("rm", f"{REPO}:Q8_0")
    assert done.returncode == 0, done.stderr
    assert not models.exists()


def test_bytes_that_are_not_the_hubs_are_deleted(command: Command, hub: Hub, models: Path) -> None:
    hub.lies.add(f"{REPO}/m-Q4_K_M.gguf")
    done = command("pull", f"{REPO}:Q4_K_M")
    assert done.returncode == 1
    assert "m-Q4_K_M.gguf: what came is not what the hub has (SHA-256" in done.stderr
    assert names(models) == set()


def test_fewer_bytes_than_the_hub_says(command: Command, hub: Hub, models: Path) -> None:
    hub.sizes[f"{REPO}/m-Q4_K_M.gguf"] = len(BYTES) + 1
    done = command("pull", f"{REPO}:Q4_K_M")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{REPO}: Consistency check failed" in done.stderr
    assert not (models / "m-Q4_K_M.gguf").exists()


def test_no_room(command: Command, hub: Hub, models: Path) -> None:
    hub.sizes[f"{REPO}/m-Q4_K_M.gguf"] = 10**16
    done = command("pull", f"{REPO}:Q4_K_M")
    assert done.returncode == 1
    assert "10,000,000.0 GB are to come and" in done.stderr and "ROUTEAHEAD_MODELS" in done.stderr
    assert not hub.gets() and names(models) == set()


def test_what_is_refused(command: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = command("pull", f"{REPO}:Q2_K")
    assert missing.returncode == 1
    assert "no such quantisation" in missing.stderr and "Q4_K_M (0.3 MB), Q8_0" in missing.stderr
    absent = command("pull", "some/other:Q2_K")
    assert absent.returncode == 1 and "the hub has no such repository" in absent.stderr
    hub.gated.add(REPO)
    gated = command("pull", f"{REPO}:Q8_0")
    assert gated.returncode == 1 and f"gated: accept its terms at {hub.url}/{REPO}" in gated.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert command("pull", f"{REPO}:Q8_0").returncode == 0
    tokens = {one.content: one.token for one in hub.asked if one.method == "GET"}
    assert tokens == {False: "Bearer hf_secret", True: ""}  # the content network gets no token
    for done in (missing, absent, gated):
        assert len(done.stderr.strip().splitlines()) == 1


def test_no_network(command: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.close()
    done = command("pull", f"{REPO}:Q4_K_M")
    assert done.returncode == 1 and "cannot be reached" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_run_fetches_a_model_once(hub: Hub, models: Path) -> None:
    hub.files[f"{REPO}/m-F16.gguf"] = DEFAULT_MODEL.read_bytes()
    line = [sys.executable, "-m", "routeahead.cli.main", "run", f"hf:{REPO}:F16"]
    line += ["-p", "Translate to French: seven", "-n", "4", "-t", "1"]
    first, second = (
        subprocess.run(
            line, env={**os.environ, **more}, capture_output=True, text=True, check=False
        )
        for more in ({}, {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"})
    )
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert first.stdout == second.stdout and first.stdout.strip()
    assert len(hub.gets()) == 1
    line[4] = f"hf:{REPO}:Q8_0"
    third = subprocess.run(
        line, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    assert third.returncode == 1 and "HF_HUB_OFFLINE is set" in third.stderr


def test_a_forgotten_prefix(command: Command) -> None:
    done = command("run", f"{REPO}:Q8_0", "-p", "x")
    assert done.returncode == 1 and f"write hf:{REPO}:Q8_0" in done.stderr
