"""`--csv`: the means that stand beside its last line are those of its lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from routeahead.telemetry.counters import Totals
from routeahead.telemetry.step_log import COLUMNS, StepLog
from routeahead.telemetry.table import read_arrow, read_table


def step(number: int) -> Totals:
    return Totals(
        tokens=1, wall_s=0.001 * number, bytes_read=4096 * number, committed=number % 3,
        compared_slots=8, agreed_slots=number % 9, gemv_s=1e-4 * number, evictions=number,
    )  # fmt: skip


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("count", [1, 2, 32, 33, 70])
def test_the_last_line_has_the_means(tmp_path: Path, count: int, suffix: str) -> None:
    path = tmp_path / f"steps.{suffix}"
    log = StepLog(path, {"cache_mb": 8})
    for number in range(count):
        log.add(step(number))
    log.close()
    table, facts = read_arrow(path)
    assert table.num_rows == count and facts["cache_mb"] == 8
    assert list(facts["means"]) == [name for name in COLUMNS if name != "token"]
    for name, mean in facts["means"].items():
        assert mean == pytest.approx(np.mean(table.column(name).to_numpy()), abs=1e-6)
    assert read_table(path, COLUMNS).facts == facts
    assert facts["means"]["compared_slots"] == 8


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_means_are_over_tokens_and_not_over_lines(tmp_path: Path, suffix: str) -> None:
    """A batch of four rows, of which three are guesses and two of these right, is three tokens."""
    path = tmp_path / f"steps.{suffix}"
    log = StepLog(path, {})
    log.add(step(1))
    log.add(Totals(tokens=4, drafted=3, bytes_read=7 * 4096))
    log.accepted()
    log.accepted()
    log.close()
    table, facts = read_arrow(path)
    assert table.column("token").to_pylist() == [1, 4]
    assert facts["means"]["bytes_read"] == 8 * 4096 / 4
    assert facts["means"]["accepted"] == 2 / 4


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_without_a_token_there_are_no_means(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"steps.{suffix}"
    StepLog(path, {"cache_mb": 8}).close()
    table, facts = read_arrow(path)
    assert table.num_rows == 0 and "means" not in facts


def test_a_run_that_was_cut_short_has_its_lines_and_no_means(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    log = StepLog(path, {"cache_mb": 8})
    for number in range(33):
        log.add(step(number))
    table, facts = read_arrow(path)
    assert table.num_rows == 32 and facts == {"cache_mb": 8}
    log.close()
