"""`routeahead pack`, and the other verbs on what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import Command
from support.library import Library

from routeahead.models import DEFAULT_MODEL

ASKED = ("-p", "What is 12 + 7?", "-t", 1)


@pytest.fixture
def packed(command: Command, tmp_path: Path) -> Path:
    target = tmp_path / "packed.gguf"
    done = command("pack", DEFAULT_MODEL, target)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"routeahead: packed into {target}\n"
    return target


def test_it_answers_as_the_original_with_a_third_of_the_reads(
    command: Command, packed: Path, tmp_path: Path
) -> None:
    texts, reads = [], []
    for number, model in enumerate((DEFAULT_MODEL, packed)):
        report = tmp_path / f"{number}.json"
        done = command("run", model, *ASKED, "--cache-mb", 1, "--force-cache", "--report", report)
        assert done.returncode == 0, done.stderr
        content = json.loads(report.read_text())
        texts.append(content["text"])
        reads.append(sum(content["decode_steps"]["reads"]))
    assert texts[0] == texts[1] and reads[0] == 3 * reads[1] > 0


def test_inspect_says_so(command: Command, packed: Path) -> None:
    assert f"{packed} (qwen3moe, packed)" in command("inspect", packed).stdout
    facts = json.loads(command("inspect", packed, "--json").stdout)
    plain = json.loads(command("inspect", DEFAULT_MODEL, "--json").stdout)
    assert facts.pop("packed") is True and plain.pop("packed") is False
    for one in (facts, plain):
        for differs in ("files", "file_bytes", "free_bytes", "fits"):
            del one[differs]
    assert facts == plain


def test_a_mistake_is_one_line(command: Command, packed: Path, library: Library) -> None:
    mistakes = [
        (("pack", DEFAULT_MODEL, packed), "exists: give another name, or delete it"),
        (("pack", packed, packed.with_name("again.gguf")), "is packed already"),
        (("run", packed, *ASKED, "--resident"), "llama.cpp cannot load a packed file"),
        (("eval", packed, "--text", __file__, "--max-tokens", 8), "cannot load a packed file"),
    ]
    for line, words in mistakes:
        done = command(*line)
        [said] = done.stderr.strip().splitlines()
        assert done.returncode == 1 and said.startswith("routeahead: ") and words in said


@pytest.mark.timeout(120)
def test_doctor_probes_what_is_read(command: Command, packed: Path) -> None:
    done = command("doctor", packed, "--cache-mb", 2, "--json")
    assert done.returncode == 0, done.stderr
    slices = [
        json.loads(command("doctor", model, "--cache-mb", 2, "--json").stdout)["disk"][
            "slice_bytes"
        ]
        for model in (DEFAULT_MODEL, packed)
    ]
    assert slices[1] == 3 * slices[0]


def test_settings_are_graded_against_a_streamed_baseline(
    command: Command, packed: Path, tmp_path: Path
) -> None:
    text, found = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("Paris is the capital of France. " * 4)
    done = command(
        "eval", packed, "--text", text, "--baseline", "--cache-mb 2",
        "--setting", "none:--cache-mb 0", "--max-tokens", 16, "-c", 32, "-t", 1, "--json", found,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, graded = json.loads(found.read_text())["results"]
    assert graded["text"]["kl_mean"] == 0
