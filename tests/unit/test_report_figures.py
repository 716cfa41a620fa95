"""What the page of recorded runs shows, as numbers; and which file belongs to which run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.traces import csv_text, decode_trace

from routeahead.errors import SettingsError
from routeahead.replay.eviction import Policy
from routeahead.report import figures
from routeahead.report.runs import Routes, Run, read_runs
from routeahead.telemetry.route_trace import RouteTrace
from routeahead.telemetry.step_log import COLUMNS


def reads(*rows: tuple[int, float, float, int, int, str, int]) -> dict[str, Any]:
    """Columns of an I/O trace: step, begin and end in seconds, lane, layer, kind, bytes."""
    step, begin, end, lane, layer, kind, nbytes = map(np.array, zip(*rows, strict=True))
    return {
        "phase": np.array(["decode" if one else "prefill" for one in step]),
        "step": step,
        "time_s": end,
        "latency_s": end - begin,
        "lane": lane,
        "layer": layer,
        "kind": kind,
        "bytes": nbytes,
    }


def test_a_timeline_is_of_one_token_and_begins_with_its_first_read() -> None:
    columns = reads(
        (0, 0.0, 0.5, 0, 0, "demand", 100),
        (1, 1.0, 1.1, 0, 0, "demand", 10),
        (2, 2.5, 2.6, 1, 3, "committed", 30),
        (2, 2.0, 2.4, 0, 1, "demand", 20),
        (3, 3.0, 3.1, 0, 0, "demand", 99),
    )
    found = figures.timeline(columns, None)
    assert found and found.step == 2  # reads 50; the others 10 and 99
    assert found.begin == pytest.approx([0, 500]) and found.length == pytest.approx([400, 100])
    assert found.layer.tolist() == [1, 3] and found.kind.tolist() == ["demand", "committed"]
    one = figures.timeline(columns, 3)
    assert one and one.nbytes.tolist() == [99]
    with pytest.raises(SettingsError, match="from 1 to 3"):
        figures.timeline(columns, 0)  # of the prompt
    assert figures.timeline(reads((0, 0.0, 0.5, 0, 0, "demand", 1)), None) is None


def test_a_curve_ends_where_everything_fits() -> None:
    trace = decode_trace([[[0, 1], [2]], [[1, 0], [2]], [[0, 3], [1]]], [10, 20])
    recorded = RouteTrace(trace.expert_bytes, trace.batches, np.array([[1, 0, 0, 0, 3]]))
    found = figures.curve(Routes(recorded))
    assert found and found.mib[-1] == 4 * 30 / (1 << 20) and found.tokens == 3
    for policy in (Policy.LRU, Policy.BELADY):
        rates = found.rates[policy]
        assert rates[-1] == pytest.approx(4 / 9) and sorted(rates) == rates


def slots(*rows: tuple[int, int, int, int]) -> np.ndarray[Any, Any]:
    """Columns of decoded slots: step, layer, slot, expert."""
    return np.array([(1, *row) for row in rows], np.int64)


def test_hot_experts_are_shares_of_the_decoded_tokens() -> None:
    trace = decode_trace([[[0, 1]], [[0, 2]]], [10])
    rows = [(0, 0, 0, 0), (0, 0, 1, 1), (1, 0, 0, 0), (1, 0, 1, 2)]
    prompt = np.array([[0, 0, 0, 0, 3]], np.int64)
    table = np.concatenate([prompt, slots(*rows)])
    found = figures.hot_experts(RouteTrace(trace.expert_bytes, trace.batches, table), 8)
    assert found and found.share.tolist() == [[1, 0.5, 0.5, 0, 0, 0, 0, 0]]
    assert found.half == 1 / 8  # of 4 slots, 2 went to expert 0


def test_agreement_is_counted_whatever_the_order() -> None:
    rows = [(5, 0, 0, 1), (5, 0, 1, 2), (5, 4, 0, 1), (5, 4, 1, 2), (6, 4, 0, 3), (6, 4, 1, 4)]
    trace = RouteTrace({0: 1, 4: 1}, [], slots(*rows))
    committed = np.array([0, 0, 1, 1, 1, 1])
    router = np.array([1, 2, 2, 9, 4, 3])
    run = Run("a", routes=Routes(trace, committed, router))
    assert figures.agreement(run) == {"committed": {4: 0.75}}
    counted = {"depth": 2, "by_layer": {"4": {"slots": 8, "agreed_slots": 2}}}
    assert figures.agreement(Run("a", {"route_ahead": counted})) == {"route-ahead 2": {4: 0.25}}
    probed = {"stale 1": {"by_layer": {"1": {"overlap": 0.5}, "0": {"overlap": None}}}}
    assert figures.agreement(Run("a", {"predictors": probed})) == {"stale 1": {1: 0.5}}
    assert figures.agreement(Run("a")) == {}


def step_file(path: Path, tokens: int = 2) -> Path:
    lines = [",".join(COLUMNS), *(",".join("2" for _ in COLUMNS) for _ in range(tokens))]
    path.write_text("\n".join(lines) + "\n")
    return path


def report_file(path: Path, **settings: Any) -> Path:
    columns = ("wall_s", "compute_s", "stall_s", "mgmt_s", "bytes_read", "hits", "misses")
    steps = {name: [1, 3] for name in columns}
    path.write_text(json.dumps({"counters": {}, "decode_steps": steps, "settings": settings}))
    return path


def test_files_are_told_apart_and_grouped(tmp_path: Path) -> None:
    a, b = report_file(tmp_path / "a.json", temp=0.0, seed=1, x=1), tmp_path / "b.json"
    report_file(b, temp=0.0, seed=2, x=2)
    (tmp_path / "folder").mkdir()
    step_file(tmp_path / "folder" / "any.csv", 5)
    (tmp_path / "folder" / "notes.txt").write_text("no file of a run")
    steps, routes = step_file(tmp_path / "steps.csv"), tmp_path / "routes.csv"
    routes.write_text(csv_text())
    found = read_runs([a, steps, routes, tmp_path / "folder", b])
    assert [run.name for run in found] == ["a", "folder", "b"]
    assert [sorted(run.files) for run in found] == [
        ["report", "routes", "steps"],
        ["steps"],
        ["report"],
    ]
    assert [len(run.steps["wall"]) for run in found] == [2, 5, 2]
    assert figures.settings([found[0], found[2]]) == {"x": ["1", "2"]}  # the seed drew nothing
    assert figures.summary(found[2])["ms a token"] == "2000.0"
    assert figures.summary(found[2])["hit rate"] == "50.0%"
    assert [run.name for run in read_runs([a, a])] == ["a", "a (2)"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.txt", "", "give a file of"),
        ("x.csv", "", "x.csv: "),
        ("x.csv", "a,b\n1,2\n", "the columns of no table"),
        ("x.json", "{", "x.json: "),
        ("x.json", "[]", "not a report"),
        ("x.json", '{"counters": {}, "decode_steps": {"wall_s": [1]}}', "decode_steps"),
        ("x.parquet", "no parquet", "x.parquet: "),
    ],
)
def test_other_files_are_refused_in_one_line(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(SettingsError, match=said) as refused:
        read_runs([path])
    assert "\n" not in str(refused.value)


def test_a_folder_is_one_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no file of a run in it"):
        read_runs([tmp_path])
    step_file(tmp_path / "a.csv")
    step_file(tmp_path / "b.csv")
    with pytest.raises(SettingsError, match=r"a\.csv and b\.csv are of one kind"):
        read_runs([tmp_path])
