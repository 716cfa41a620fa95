"""Benchmarks keep what they have measured when they are ended."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path

import pytest
from support.library import Library

ROOT = Path(__file__).parents[2]


@pytest.mark.fast
def test_a_prompt_benchmark_that_is_ended(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second cell is broken off in the second pass that counts."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    prompt = importlib.import_module("prompt")
    evaluate, done = prompt.evaluate, itertools.count(1)

    def ended(*args: object) -> dict[str, float]:
        if next(done) == 2 * 4 + 2 * 2 + 2:  # two models; a pass that does not count, and three
            raise KeyboardInterrupt
        return dict(evaluate(*args))

    monkeypatch.setattr(prompt, "evaluate", ended)
    path = tmp_path / "prompt.json"
    words = [
        "prompt.py",
        str(library.path("qwen3moe")),
        "--rows",
        "40",
        "-t",
        "1",
        "--json",
        str(path),
    ]
    monkeypatch.setattr("sys.argv", [*words, "--passes", "3", "--cells", "0:400", "900:400"])
    with pytest.raises(KeyboardInterrupt):
        prompt.main()
    whole, part = json.loads(path.read_text(encoding="utf-8"))
    assert [len(one) for one in whole["passes"].values()] == [3, 3]
    assert [len(one) for one in part["passes"].values()] == [1, 1]
    assert (part["throttle"], len(part["of_bound"]), part["rows"]) == (900, 1, 40)
