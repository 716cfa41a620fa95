"""Tables on disk: what was added is read back, from both formats, and after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from routeahead.errors import SettingsError
from routeahead.telemetry.table import CsvTable, open_table, read_table

COLUMNS = {"step": "int64", "kind": "string", "weight": "float64"}
FACTS = {"layers": {"0": 7}}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_what_was_added_is_read_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table.{suffix}"
    table = open_table(path, COLUMNS, ["layer=0 bytes=7"], FACTS)
    table.add([[1, 2], ["demand", "early"], [0.1234567, float("nan")]])
    table.add([[2**40], ["demand"], [1e-7]])
    table.close()
    found = read_table(path, {"weight": "float64", "step": "int64", "kind": "string"})
    assert found.columns["step"].tolist() == [1, 2, 2**40]
    assert found.columns["kind"].tolist() == ["demand", "early", "demand"]
    np.testing.assert_array_equal(found.columns["weight"], [0.1234567, np.nan, 1e-7])
    assert [found.head, found.facts] == (
        [["layer=0 bytes=7"], None] if suffix == "csv" else [(), FACTS]
    )


def test_a_csv_is_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table = CsvTable(path, COLUMNS, ["cache_mb=0", 'model="m, with commas"'])
    table.add([[1], ["demand"], [0.5]])
    table.comment("totals={}")
    table.close()
    assert path.read_text() == (
        '# cache_mb=0\n# model="m, with commas"\nstep,kind,weight\n1,demand,0.5\n# totals={}\n'
    )


def test_a_csv_of_a_killed_run_has_all_that_was_added(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    script = (
        "import os, signal, sys; from pathlib import Path; "
        "from routeahead.telemetry.table import open_table; "
        f"table = open_table(Path(sys.argv[1]), {COLUMNS}, [], {{}}); "
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
    with pytest.raises(SettingsError, match="cannot be written: No such file"):
        open_table(path, COLUMNS, [], {})
