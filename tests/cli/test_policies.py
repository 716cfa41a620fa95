"""A policy of one's own through `run`, `bench` and `eval`, and what is said of a bad one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import Command

ROOT = Path(__file__).parents[2]
SWAP = "--cache-mb 2 --policy examples.swap_policy:Swap"


def written(command: Command, path: Path, *arguments: object) -> Any:
    done = command(*arguments, path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_the_example_is_short() -> None:
    assert len((ROOT / "examples" / "swap_policy.py").read_text().splitlines()) <= 25


def test_the_example_through_run(command: Command, tmp_path: Path) -> None:
    common = ("run", "-p", "Question: What is 12 + 7?\nAnswer:", "-n", 12, "-t", 1)
    plain = written(command, tmp_path / "plain.json", *common, "--cache-mb", 2, "--report")
    swapped = written(command, tmp_path / "swap.json", *common, *SWAP.split(), "--report")
    assert swapped["swap"]["swapped"] > 0 and "swap" not in plain
    assert swapped["settings"]["policy"] == ["examples.swap_policy:Swap"]
    assert swapped["counters"]["misses"] < plain["counters"]["misses"]


def test_the_example_through_bench(command: Command, tmp_path: Path) -> None:
    cells = ("--cell", "plain:--cache-mb 2", "--cell", f"swap:{SWAP}")
    sizes = ("--passes", 1, "--tokens", 6, "--warmup", 2, "-t", 1)
    found = written(command, tmp_path / "bench.json", "bench", *cells, *sizes, "--json")
    assert {run["cell"] for run in found["runs"]} == {"plain", "swap"}
    for run in found["runs"]:
        swapped = run["report"].get("swap", {"swapped": 0})["swapped"]
        assert (swapped > 0) == (run["cell"] == "swap")


def test_the_example_through_eval(command: Command, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 4)
    sizes = ("-c", 64, "--max-tokens", 24, "-t", 1, "--work", tmp_path / "work")
    arguments = ("eval", "--text", text, *sizes, "--setting", f"swap:{SWAP}", "--json")
    found = written(command, tmp_path / "eval.json", *arguments)
    assert found["results"][1]["name"] == "swap" and found["results"][1]["text"]["kl_mean"] > 0
    assert (
        written(command, tmp_path / "again.json", *arguments) == found
    )  # resumes: nothing left to do


BAD = {
    "nothing.py": "",
    "broken.py": "raise ValueError('of\\nno use')",
    "strange.py": "class Strange: pass",
    "wrong.py": """
from routeahead import Policy
class Wrong(Policy):
    def routed(self, routing):
        routing.choose([routing.ids.max() + 99] * 4, 0)
""",
}


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("nothing", "policy 'nothing': give MODULE:CLASS"),
        ("absent:Policy", "policy 'absent:Policy': ModuleNotFoundError: No module named 'absent'"),
        ("nothing:Policy", "AttributeError: module 'nothing' has no attribute 'Policy'"),
        ("broken:Policy", "ValueError: of no use"),
        ("strange:Strange", "is no routeahead.Policy; derive the class from it"),
        ("wrong:Wrong", "layer 0: a policy chose expert "),
    ],
)
def test_a_bad_policy_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str, words: str
) -> None:
    for name, text in BAD.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in BAD:
        sys.modules.pop(name.removesuffix(".py"), None)
    done = command("run", "-p", "a", "-n", 2, "-t", 1, "--policy", policy)
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
