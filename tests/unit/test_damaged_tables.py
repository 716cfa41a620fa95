"""Traces on a disk that is full, cut short, or in a format that cannot be read here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.traces import ROWS, csv_text

from routeahead.errors import SettingsError
from routeahead.telemetry import table
from routeahead.telemetry.counters import Totals
from routeahead.telemetry.io_trace import COLUMNS, read_io_trace
from routeahead.telemetry.json_file import write_json
from routeahead.telemetry.route_trace import read_trace
from routeahead.telemetry.step_log import StepLog

FULL = Path("/dev/full")
full_disk = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
ROW = [0.5, 0, "decode", 0, "demand", 1, 2, "up", 0, 4096, 4096, 0.001]
LINE = [[value] for value in ROW]


@full_disk
def test_a_full_disk_names_the_file_once(tmp_path: Path) -> None:
    csv = table.open_table(FULL, COLUMNS, {})
    with pytest.raises(SettingsError, match=r"^/dev/full: cannot be written: No space left"):
        for _ in range(10_000):
            csv.add(LINE)
    csv.add(LINE)  # a run that goes on, or closes in a `finally`, hides nothing by a second error
    csv.close()


@full_disk
def test_a_full_disk_is_noticed_when_a_table_is_closed() -> None:
    log = StepLog(FULL, {"model": "x"})
    log.add(Totals(tokens=1))
    with pytest.raises(SettingsError, match="/dev/full: cannot be written: No space left"):
        log.close()


def test_a_full_disk_leaves_no_parquet_without_a_word(tmp_path: Path) -> None:
    """Files of this process may have 4 KiB: the limit stands for a disk's end."""
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from routeahead.telemetry import table, io_trace, json_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "folder = Path(sys.argv[1])\n"
        "row = lambda i: [float(i), i, 'decode', 0, 'demand', i, i, 'up', 0, i, i, i / 7]\n"
        "rows = [row(i) for i in range(5000)]\n"
        "def parquet():\n"
        "    t = table.open_table(folder / 'trace.parquet', io_trace.COLUMNS, {})\n"
        "    t.add(list(zip(*rows)))\n"
        "    t.close()\n"
        "for write in (parquet, lambda: json_file.write_json(folder / 'report.json', rows)):\n"
        "    try:\n"
        "        write()\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    )
    parquet, json = done.stdout.splitlines()
    assert parquet.startswith(f"SettingsError {tmp_path}/trace.parquet: cannot be written: ")
    assert json.startswith(
        f"SettingsError {tmp_path}/report.json: cannot be written: File too large"
    )
    assert not list(tmp_path.glob("report*"))  # nothing half-written


@pytest.mark.parametrize("lost", [1, 3, 5, 8])
def test_a_routing_trace_cut_inside_a_row_is_read_up_to_there(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "cut.csv"
    path.write_text(csv_text()[:-lost])
    with pytest.warns(UserWarning, match=r"cut\.csv: ends inside a line"):
        cut = read_trace(path)
    path.write_text(csv_text(ROWS[:-1]))
    assert cut == read_trace(path)


@pytest.mark.parametrize("lost", [1, 4, 40])
def test_an_io_trace_cut_inside_a_row_is_read_up_to_there(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "io.csv"
    written = table.open_table(path, COLUMNS, {})
    written.add([[value] * 3 for value in ROW])
    written.close()
    path.write_text(path.read_text()[:-lost])
    with pytest.warns(UserWarning, match=r"io\.csv: ends inside a line"):
        assert len(read_io_trace(path)["step"]) == 2


def test_a_trace_may_be_named_by_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(csv_text())
    assert read_trace(str(path)) == read_trace(path)


def test_facts_with_any_file_name_stay_one_line(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9\nb")
    csv = table.open_table(tmp_path / "t.csv", {"a": "int64"}, {"model": name})
    csv.add([[1]])
    csv.close()
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 2
    assert table.read_table(tmp_path / "t.csv", {"a": "int64"}).facts == {"model": name}


def test_a_report_with_any_file_name_is_written(tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", {"model": Path(os.fsdecode(b"caf\xe9"))})
    assert "caf\\udce9" in (tmp_path / "r.json").read_text()
