"""`routeahead replay` as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from support.traces import csv_text
from typer.testing import CliRunner

from routeahead.cli import replay as replay_verb
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB


def invoke(trace: Path, *options: str) -> Any:
    app = typer.Typer()
    app.command()(replay_verb.replay)
    return CliRunner().invoke(app, [str(trace), *options])


@pytest.fixture
def big_trace(tmp_path: Path) -> Path:
    """`ROWS` with experts of 3 MiB in layer 0 and 6 MiB in layer 2."""
    path = tmp_path / "t.csv"
    text = csv_text().replace("_bytes=30", f"_bytes={3 * MIB}")
    path.write_text(text.replace("_bytes=60", f"_bytes={6 * MIB}"))
    return path


def test_verb_prints_json(big_trace: Path) -> None:
    """27 MiB: 9 for layer 0 and 18 for layer 2, three experts each. The prompt leaves layer 2's
    experts 4 and 1 and all three of layer 0.

    Token 2 hits 5 and 7, hits 1 and reads 0. Token 3 hits 7 and 5, hits 1 and reads 2, for which 4
    of layer 2 goes.
    """
    report = json.loads(invoke(big_trace, "--cache-mb", "27", "--json").stdout)
    assert report == {
        "policy": "decay",
        "cache_mb": 27,
        "tokens": 2,
        "decode_hit_rate": 0.75,
        "hits": 6,
        "misses": 2,
        "evictions": 1,
        "bytes_read": 12 * MIB,
        "mib_per_token": 6.0,
    }


def test_verb_models_time_in_its_units(big_trace: Path) -> None:
    """A read of 2 MiB takes 1 + 2 ms; each token reads one expert, in layer 2; 2 x 5 ms compute."""
    machine = "--bandwidth 1000 --compute-ms 5 --latency-ms 1 --lanes 1 --no-overlap"
    options = ["--cache-mb", "27", "--json", *machine.split()]
    report = json.loads(invoke(big_trace, *options).stdout)
    assert report["s_per_token"] == pytest.approx(0.019)
    assert report["stall_s_per_token"] == pytest.approx(0.009)
    assert report["compute_s_per_token"] == pytest.approx(0.010)
    assert report["io_s_per_token"] == pytest.approx(0.009)
    assert report["machine"]["bandwidth"] == 1000 * MIB


def test_verb_prints_a_table(big_trace: Path) -> None:
    output = invoke(
        big_trace, "--cache-mb", "27", "--bandwidth", "1000", "--compute-ms", "5"
    ).stdout
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert "cache 27 MiB, decay" in lines
    assert "hit rate 75.0%" in lines
    assert "a token 6.0 MiB" in lines
    assert "compute 10.0 ms" in lines


def test_verb_refuses_half_a_machine(big_trace: Path) -> None:
    result = invoke(big_trace, "--cache-mb", "27", "--lanes", "4")
    assert isinstance(result.exception, SettingsError)
    assert "--bandwidth and --compute-ms" in str(result.exception)
