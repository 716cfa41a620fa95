"""docs/performance.md says what the runs left."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("performance_page")


def blocks(page: ModuleType, text: str) -> dict[str, str]:
    found = {}
    for subject in page.SUBJECTS:
        assert text.count(f"<!-- {subject} -->\n") == 1
        found[subject] = text.partition(f"<!-- {subject} -->\n")[2].partition("\n<!-- end -->")[0]
    return found


def test_the_page_is_what_the_runs_left(page: ModuleType) -> None:
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    tables = page.tables(ROOT / "docs")
    assert blocks(page, text) == tables, "run benchmarks/performance_page.py docs"
    assert "decay-2000" in tables["eviction"]


def one_pass(seconds: float) -> dict[str, float]:
    return {"s": seconds, "stall_s": 0.2, "mib": 1663.0}


CELL = {
    "layers": 12, "text": False, "throttle": 600, "cache_mb": 2000, "rows": 8192, "context": 8448,
    "threads": 2, "ubatch": 4096, "of_bound": [0.9, 0.91], "of_compute": [1.0, 1.1],
    "passes": {"streamed": [one_pass(10), one_pass(11)], "resident": [one_pass(10), one_pass(10)]},
}  # fmt: skip
ALONE = {
    **CELL, "layers": 48, "text": True, "throttle": 0, "passes": {"streamed": [one_pass(30)]},
    "of_bound": [1.02], "of_compute": [1.0],
}  # fmt: skip


def bench(**speeds: float) -> dict[str, Any]:
    """What `routeahead bench --json` writes, without what is not shown."""
    summary = [
        {
            "name": name,
            "runs": 3,
            "figures": {"tok_per_s": {"median": speed}, "ms": {"median": 1e3 / speed}},
            "ratios": {"tok_per_s": {"median": 22.0}} if number else {},
        }
        for number, (name, speed) in enumerate(speeds.items())
    ]
    return {"cells": [{"flags": ["/home/me"]}], "summary": summary, "runs": []}


RECORDS = {
    "prompt-8192.json": [CELL],
    "prompt-48.text.json": [ALONE],
    "mmap.json": bench(mmap=0.5, auto=11.0),
    "filling.json": [
        {
            "layers": 12, "throttle": 600.0, "cache_mb": 0, "tokens": 32,
            "runs": {
                "4.0": {"off": [one_pass(6.0)] * 8, "on": [one_pass(4.0)] * 8},
                "0.0:128": {
                    "off": [one_pass(2.0) | {"later_s": 1.0}] * 8,
                    "on": [one_pass(2.0) | {"later_s": 2.0}] * 8,
                },
            },
        }
    ],
    "pack.json": [
        {"kib": 18, "lanes": 2, "throttle": 0, "ms": {"apart": [3.0], "together": [2.0]}}
    ],
}  # fmt: skip


def test_whatever_records_there_are(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs, given = tmp_path / "docs", []
    (docs / "performance").mkdir(parents=True)
    places = [f"<!-- {subject} -->\nold\n<!-- end -->" for subject in page.SUBJECTS]
    (docs / "performance.md").write_text("\n".join(["# A page", *places, "its end"]))
    for name, content in RECORDS.items():
        (tmp_path / name).write_text(json.dumps(content))
        given.append(str(tmp_path / name))
    monkeypatch.setattr("sys.argv", ["performance_page.py", str(docs), *given])
    page.main()
    text = (docs / "performance.md").read_text(encoding="utf-8")
    tables = blocks(page, text)
    assert tables == page.tables(docs) and text.endswith("its end")
    rows = {name: table.splitlines()[2:] for name, table in tables.items()}
    assert tables["eviction"] == "*Not measured yet.*"
    assert rows["prompt"] == [
        "| 48 | 8,192 of a text | unthrottled | 2,000 MiB | 4,096 | 1 | 30.0 s | 0.20 s | 1,663 "
        "| does not fit | 1.02 (1.02..1.02) |  |  |",
        "| 12 | 8,192 | 600 MiB/s | 2,000 MiB | 4,096 | 2 | 10.5 s | 0.20 s | 1,663 "
        "| 10.0 s | 0.91 (0.90..0.91) | 1.05 (1.00..1.10) |  |",
    ]
    assert rows["mmap"] == [
        "| mmap | 3 | 1 (0.5/s) | 2000.0 |",
        "| auto | 3 | 22.00 | 90.9 |",
    ]
    assert rows["filling"] == [
        "| 12 | 600 MiB/s | all experts | 32 | 4 s, 1 | 8 | 6.0 s | 4.0 s | 1.50 (1.50..1.50) "
        "|  | 1,663, 1,663 |",
        "| 12 | 600 MiB/s | all experts | 32 | 0 s, 128 | 8 | 2.0 s | 2.0 s | 1.00 (1.00..1.00) "
        "| 0.50 (0.50..0.50) | 1,663, 1,663 |",
    ]
    assert rows["pack"] == ["| unthrottled | 2 | 3 × 18 KiB | 1 | 3.00 ms | 2.00 ms | 1.50 |"]
    assert "/home/me" not in (docs / "performance" / "mmap.json").read_text()


def test_what_has_no_place_is_said(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "performance").mkdir()
    (tmp_path / "performance.md").write_text("a page")
    monkeypatch.setattr("sys.argv", ["performance_page.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="put <!-- prompt --> and <!-- end -->"):
        page.main()
    (tmp_path / "performance" / "speed.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"speed.json: a record's name begins with prompt, "):
        page.main()
