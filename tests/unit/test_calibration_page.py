"""docs/calibration.md and the README's table of speeds say what the runs left."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("calibration_page")


def block(path: Path, mark: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n(.*?)<!-- end -->", path.read_text(), re.DOTALL)
    assert found, f"{path} has no place for {mark}"
    return found[1]


def test_the_pages_say_what_the_runs_left(page: ModuleType) -> None:
    docs, again = ROOT / "docs", "run benchmarks/calibration_page.py docs"
    found = {name: gates for name in page.MODELS if (gates := page.agreements(name))}
    written = {
        "agreement": page.agreement_tables(found),
        "same": page.same_table(docs),
        "quality": page.quality_tables({name: page.read(docs, name) for name in page.MODELS}),
    }
    for mark, content in written.items():
        assert block(docs / "calibration.md", mark).strip() == content.strip(), again
    table = page.decision_table(docs)
    assert block(docs / "calibration.md", "decision").strip() == table.strip(), again
    readme = block(ROOT / "README.md", "decision")
    assert table in readme and bool(readme.strip()) == bool(table), again


def test_a_record_keeps_what_is_shown_and_no_folder(page: ModuleType) -> None:
    summary = [{"name": "stream", "ratios": {}, "figures": {}}]
    cells = [{"name": "stream", "flags": ["--cache-mb", "9", "--throttle", "850"]}]
    bench = {"cells": cells, "summary": summary, "runs": [{"command": ["/home/me"]}]}
    assert page.kept(bench) == {"throttle_mib_s": 850.0, "summary": summary}
    results = [{"name": "baseline"}]
    assert page.kept({"model": "/home/me/m.gguf", "results": results}) == {"results": results}


def test_the_table_joins_speed_and_quality(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graded(name: str, perplexity: float, right: int) -> dict[str, object]:
        text = {"perplexity": perplexity, "kl_mean": 0.1, "agreement": 0.9}
        return {"name": name, "text": text, "answers": {"sums": [right, 100]}}

    def cell(name: str, **ratios: object) -> dict[str, object]:
        figures = {"mib_per_token": 8.5, "compute_ms": 20.0, "tok_per_s": 30.0}
        medians = {key: {"median": value} for key, value in figures.items()}
        return {"name": name, "figures": medians, "ratios": ratios}

    quality = [graded("baseline", 20, 99), graded("stream", 20, 99), graded("ahead-2", 21, 90)]
    ratio = {"median": 1.25, "low": 1.2, "high": 1.3}
    speed = {"throttle_mib_s": 850, "summary": [cell("stream"), cell("ahead-2", tok_per_s=ratio)]}
    records = {"inflated-quality": {"results": quality}, "inflated-rho-0.6": speed}
    monkeypatch.setattr(page, "read", lambda docs, name: records.get(name))
    header, _, stream, ahead = page.decision_table(tmp_path).splitlines()
    assert "reads ÷ compute = 0.50" in header
    assert stream == "| stream | 1.0000 | 99/100 | 8.5 | 1 (30.0/s) |"
    assert ahead == "| ahead-2 | 1.0500 | 90/100 | 8.5 | 1.25 (1.20..1.30) |"
