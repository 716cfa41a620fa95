"""Tables on disk: what was added is read back, from both formats, and after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import routeahead
from routeahead.errors import SettingsError
from routeahead.telemetry.table import open_table, read_arrow, read_table

COLUMNS = {"step": "int64", "kind": "string", "weight": "float64"}
FACTS = {"layers": {"0": 7}}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_what_was_added_is_read_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table.{suffix}"
    table = open_table(path, COLUMNS, FACTS)
    table.add([[1, 2], ["demand", "early"], [0.1234567, float("nan")]])
    table.add([[2**40], ["demand"], [1e-7]])
    table.close()
    found = read_table(path, {"weight": "float64", "step": "int64", "kind": "string"})
    assert found.columns["step"].tolist() == [1, 2, 2**40]
    assert found.columns["kind"].tolist() == ["demand", "early", "demand"]
    np.testing.assert_array_equal(found.columns["weight"], [0.1234567, np.nan, 1e-7])
    assert found.facts == FACTS
    whole, facts = read_arrow(path)
    assert facts == FACTS and whole.column_names == list(COLUMNS)
    assert whole.column("step").to_pylist() == [1, 2, 2**40]


def test_a_csv_is_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table = open_table(path, COLUMNS, {"model": "m, # with \u00e9"})
    table.add([[1, 2], ["demand", "early"], [0.5, float("nan")]])
    table.close()
    assert path.read_text(encoding="utf-8") == (
        'step,kind,weight,facts\n1,demand,0.5,"{""model"": ""m, # with \\u00e9""}"\n2,early,nan,\n'
    )


def test_every_reader_takes_a_csv_as_it_is(tmp_path: Path) -> None:
    import pandas as pd
    import polars as pl

    path = tmp_path / "table.csv"
    table = open_table(path, COLUMNS, {"model": "m, # [x]", "layers": {"0": 7}})
    table.add([[1, 2], ["demand", "early"], [0.5, 0.25]])
    table.close()
    frame, other = pd.read_csv(path), pl.read_csv(path)
    assert frame["step"].tolist() == other["step"].to_list() == [1, 2]
    assert frame["weight"].tolist() == other["weight"].to_list() == [0.5, 0.25]
    for facts in (frame["facts"][0], other["facts"][0]):
        assert json.loads(facts) == {"model": "m, # [x]", "layers": {"0": 7}}


OLDER = (
    '# cache_mb=0\n# model="m, with commas"\nstep,kind,weight\n1,demand,0.5\n2,early,nan\n'
    '# totals={"step": 2, "kind": 1, "weight": 3}\n'
)


def test_read_trace_gives_a_frame_of_older_and_newer_traces(tmp_path: Path) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    old.write_text(OLDER)
    table = open_table(new, COLUMNS, {"cache_mb": 0})
    table.add([[1, 2], ["demand", "early"], [0.5, float("nan")]])
    table.close()
    for path in (old, new):
        frame = routeahead.read_trace(path)
        assert list(frame.columns) == ["step", "kind", "weight"]
        assert frame["step"].tolist() == [1, 2] and frame["kind"].tolist() == ["demand", "early"]
        assert frame["weight"][0] == 0.5 and frame["weight"].isna().tolist() == [False, True]
    assert routeahead.read_trace(new).attrs["facts"] == {"cache_mb": 0}
    assert "cache_mb=0" in routeahead.read_trace(old).attrs["facts"]
    with pytest.raises(routeahead.RouteAheadError, match=r"absent.csv: .*No such file"):
        routeahead.read_trace(tmp_path / "absent.csv")


def test_a_full_disk_names_the_file() -> None:
    table = open_table(Path("/dev/full"), COLUMNS, {})
    with pytest.raises(SettingsError, match="/dev/full: cannot be written: No space left"):
        table.add([[1], ["demand"], [0.5]])


def test_a_csv_of_a_killed_run_has_all_that_was_added(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    script = (
        "import os, signal, sys; from pathlib import Path; "
        "from routeahead.telemetry.table import open_table; "
        f"table = open_table(Path(sys.argv[1]), {COLUMNS}, {{}}); "
        "[table.add([[step] * 3, ['demand'] * 3, [0.5] * 3]) for step in range(100)]; "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert read_table(path, COLUMNS).columns["step"].tolist() == [
        s for s in range(100) for _ in "abc"
    ]


def test_a_number_that_is_absent_is_refused_unless_it_is_a_float(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("step,kind,weight\n1,demand,\n")
    assert np.isnan(read_table(path, COLUMNS).columns["weight"]).all()
    path.write_text("step,kind,weight\n,demand,0.5\n")
    with pytest.raises(ValueError, match="step"):
        read_table(path, COLUMNS)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "absent" / f"table.{suffix}"
    with pytest.raises(SettingsError, match="cannot be written: there is no folder"):
        open_table(path, COLUMNS, {})
