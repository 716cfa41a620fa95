"""SIGINT, SIGTERM and SIGKILL at random moments: what was written is whole, what resumes resumes.

`test_signals.py` looks at one command and one signal. Here the same command is started again after
each, on what the one before has left, and what comes out in the end is what comes out undisturbed.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hub import Hub
from support.kills import Campaign

from routeahead.models import DEFAULT_MODEL
from routeahead.telemetry.tensor_file import read_tensors

pytestmark = pytest.mark.xdist_group("machine")

FEW, MANY = 2, 30
REPO = "some/model-GGUF"
TEXT = "Add seven and eight. Paris is the capital of France. " * 40


def command(*arguments: object) -> float:
    """Runs it undisturbed; how long that took."""
    start = time.monotonic()
    line = [sys.executable, "-m", "routeahead.cli.main", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - start


def whole(folder: Path) -> None:
    """Whatever has a name of its own is complete; what is begun is hidden, or says so."""
    for path in folder.rglob("*"):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix in (".safetensors", ".partial"):
            read_tensors(path)
        elif path.suffix == ".f32":
            assert path.stat().st_size % 4 == 0 and path.stat().st_size
        else:
            assert path.suffix in (".txt", ".tmp", ".pull.lock"), path


def evaluated(report: Path) -> Any:
    """What an evaluation found, without what it cost."""
    found = json.loads(report.read_text())
    for one in found["results"]:
        one.pop("cost", None)
    return found["results"]


def evaluations(tmp_path: Path, kills: int, seed: int) -> dict[str, int]:
    text, folder = tmp_path / "text.txt", tmp_path / "here"
    text.write_text(TEXT)
    folder.mkdir()
    words = ["eval", "--text", text, "--setting", "small:--cache-mb 1", "-t", 1, "-c", 64]
    words += ["--max-tokens", 400]
    took = command(*words, "--work", tmp_path / "work", "--json", tmp_path / "undisturbed.json")
    report, work = folder / "report.json", folder / "work"

    def again() -> None:
        shutil.rmtree(work, ignore_errors=True)
        report.unlink(missing_ok=True)

    line = [*words, "--work", work, "--json", report]
    campaign = Campaign(line, lambda: whole(folder), again, took)
    counts = campaign.run(random.Random(seed), kills)
    assert evaluated(report) == evaluated(tmp_path / "undisturbed.json")
    return counts


def calibrations(tmp_path: Path, kills: int, seed: int) -> dict[str, int]:
    folder, texts = tmp_path / "here", list[Path]()
    folder.mkdir()
    rng = random.Random(seed)
    for number in range(10):
        texts.append(tmp_path / f"{number}.txt")
        words = [rng.choice(TEXT.split()) for _ in range(60)]
        texts[-1].write_text(" ".join(words))
    line: list[object] = ["calibrate", "-t", 1, "--depth", 1, "--layers", "0-3"]
    for one in texts:
        line += ["--text", one]
    took = command(*line, "--out", tmp_path / "undisturbed.safetensors")
    out = folder / "gates.safetensors"

    def again() -> None:
        out.unlink(missing_ok=True)

    campaign = Campaign([*line, "--out", out], lambda: whole(folder), again, took)
    counts = campaign.run(rng, kills)
    assert not [path for path in folder.iterdir() if path.suffix == ".partial"]
    found, expected = (read_tensors(p)[0] for p in (out, tmp_path / "undisturbed.safetensors"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)
    return counts


def pulls(tmp_path: Path, hub: Hub, kills: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    content = rng.randbytes(16 << 20)
    hub.files[f"{REPO}/m-Q4_K_M.gguf"] = content
    hub.pause_s = 0.004
    models = tmp_path / "models" / REPO
    place = models / "m-Q4_K_M.gguf"

    def check() -> None:
        assert not place.exists() or place.read_bytes() == content
        for part in models.glob(".*.part"):
            begun = part.read_bytes()
            assert begun == content[: len(begun)]

    def again() -> None:
        shutil.rmtree(models)

    took = command("pull", f"{REPO}:Q4_K_M")
    again()
    counts = Campaign(["pull", f"{REPO}:Q4_K_M"], check, again, took).run(rng, kills)
    assert place.read_bytes() == content
    return counts


def packs(tmp_path: Path, kills: int, seed: int) -> dict[str, int]:
    folder, undisturbed = tmp_path / "here", tmp_path / "undisturbed.gguf"
    folder.mkdir()
    took = command("pack", DEFAULT_MODEL, undisturbed)
    out, content, complete = folder / "out.gguf", undisturbed.read_bytes(), 0

    def check() -> None:
        nonlocal complete
        if out.exists():  # a signal may come when it is written, and before the command has ended
            assert out.read_bytes() == content
            out.unlink()
            complete += 1
        assert {path.name for path in folder.iterdir()} <= {"out.gguf.partial"}

    line = ["pack", DEFAULT_MODEL, out]
    counts = Campaign(line, check, lambda: None, took).run(random.Random(seed), kills)
    assert complete > counts.get("ended", 0) and not list(folder.iterdir())
    return counts


@pytest.mark.timeout(300)
def test_an_evaluation(tmp_path: Path) -> None:
    assert sum(evaluations(tmp_path, FEW, seed=1).values()) >= FEW


@pytest.mark.timeout(300)
def test_a_calibration(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    assert sum(calibrations(tmp_path, FEW, seed=2).values()) >= FEW


def test_a_pull(tmp_path: Path, hub: Hub) -> None:
    assert sum(pulls(tmp_path, hub, FEW, seed=3).values()) >= FEW


def test_a_pack(tmp_path: Path) -> None:
    assert sum(packs(tmp_path, FEW, seed=4).values()) >= FEW


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_evaluations(tmp_path: Path) -> None:
    print("eval", evaluations(tmp_path, MANY, 11))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_calibrations(tmp_path: Path) -> None:
    print("calibrate", calibrations(tmp_path, MANY, 12))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_pulls(tmp_path: Path, hub: Hub) -> None:
    print("pull", pulls(tmp_path, hub, MANY, 13))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_packs(tmp_path: Path) -> None:
    print("pack", packs(tmp_path, MANY, 14))
