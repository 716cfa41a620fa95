"""The interleaved benchmark, by counting: which processes ran, on what, and what was kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from support.library import Library
from typer.testing import CliRunner, Result

from routeahead.bench import machine_state
from routeahead.bench.cells import (
    CellList,
    parse_cell,
    run_order,
)
from routeahead.bench.memory_limit import MemoryLimit
from routeahead.bench.runs import Bench, Plan, Run
from routeahead.bench.summary import summarise
from routeahead.cli.bench import bench
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Takes what every cell's program takes, and reports what it is told to.
PROGRAM = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--forced-tokens")
parser.add_argument("-n", type=int)
parser.add_argument("-t", type=int)
parser.add_argument("--report")
parser.add_argument("--first-token", type=int, default=0)
parser.add_argument("--ms", type=float, default=10)
parser.add_argument("--misses", type=int, default=50)
parser.add_argument("--allocate", type=int, default=0)
parser.add_argument("--fault", default="")
given = parser.parse_args()
memory = b"x" * given.allocate
if given.fault == "exit":
    sys.exit("first line\\nno such expert")
if given.fault == "hang":
    print("hanging", flush=True)
    time.sleep(600)
tokens = list(range(given.first_token, given.first_token + given.n))
step = {
    "wall_s": given.ms / 1e3, "compute_s": given.ms / 2e3, "stall_s": given.ms / 4e3,
    "mgmt_s": given.ms / 4e3, "bytes_read": 2 << 20, "hits": 100 - given.misses,
    "misses": given.misses,
}
report = {
    "tokens": tokens,
    "decode_steps": {name: [value] * given.n for name, value in step.items()},
    "environment": {name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "SHADE")},
    "arguments": sys.argv[1:],
}
if given.fault == "empty":
    report = {}
if given.fault != "silent":
    json.dump(report, open(given.report, "w"))
"""


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_state, "PROBE_S", 0.02)


@pytest.fixture
def program(tmp_path: Path) -> str:
    """Command of a program that a cell can run."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture
def model(library: Library) -> Path:
    return library.path("qwen3moe", 4)


def run_cells(model: Path, texts: list[str], plan: Plan) -> list[Run]:
    cells = CellList("", [parse_cell(text) for text in texts])
    return list(Bench(read_layout(model), cells, plan))


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# --- runs ---


def test_every_cell_runs_in_every_pass_on_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, model: Path, program: str
) -> None:
    # Long enough for a lane to start on a machine that is busy.
    monkeypatch.setattr(machine_state, "PROBE_S", 0.2)
    plan = Plan(passes=4, tokens=3, warmup=2, threads=3, seed=7)
    texts = [f"a: SHADE=red {program} --ms 10", f"b: {program} --ms 20"]
    runs = run_cells(model, texts, plan)
    order = [["ab"[number] for number in one] for one in run_order(2, 4, seed=7)]
    assert [[run.cell for run in runs if run.pass_index == index] for index in range(4)] == order
    assert not any(run.error for run in runs)
    common = ["--forced-tokens", "seed:7", "-n", "5", "-t", "3", "--report"]
    for run in runs:
        path, *arguments = run.report["arguments"]
        assert Path(path) == model and arguments[: len(common)] == common
        assert run.report["tokens"] == [0, 1, 2, 3, 4]
        assert run.page_cache["left_bytes"] == 0
        assert run.machine["disk"]["mib_per_s"] > 0 and run.machine["available_bytes"] > 0
    shades = {run.cell: run.report["environment"]["SHADE"] for run in runs}
    assert shades == {"a": "red", "b": None}


def test_this_packages_tuning_does_not_leak_into_other_programs(model: Path, program: str) -> None:
    texts = [f"plain: {program}", f"tuned: GOMP_SPINCOUNT=7 {program}"]
    runs = run_cells(model, texts, Plan(passes=1, tokens=1))
    seen = {run.cell: run.report["environment"]["GOMP_SPINCOUNT"] for run in runs}
    assert seen == {"plain": None, "tuned": "7"}


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--fault exit", "exit status 1: no such expert"),
        ("--fault silent", "wrote no report"),
        ("--fault empty", "its report has no tokens"),
        ("--first-token 9", "decoded other tokens than the first run (good)"),
        ("-n 3", "decoded 3 tokens and not 2"),
    ],
)
def test_a_run_that_does_not_count_says_why(
    model: Path, program: str, flags: str, error: str
) -> None:
    # With seed 1 the good cell comes first, so that it is the other that differs.
    runs = run_cells(
        model, [f"good: {program}", f"bad: {program} {flags}"], Plan(passes=1, tokens=2, seed=1)
    )
    assert [run.cell for run in runs] == ["good", "bad"]
    assert runs[0].error == "" and error in runs[1].error
    good, bad = summarise(runs, ["good", "bad"], "good", warmup=0)
    assert (good.runs, bad.runs, bad.errors) == (1, 0, [runs[1].error])
    assert set(bad.ratios.values()) == {"no pair"}


def test_a_program_that_cannot_start(model: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot start \./absent"):
        run_cells(model, ["a: ./absent"], Plan(passes=1))


def test_streamed_resident_mapped_and_delayed(model: Path) -> None:
    """The real programs: all evaluate the same tokens, and each does what its name says."""
    texts = [
        "none: --cache-mb 0",
        "resident: --resident",
        f"late: DELAY_MS=30 {BENCHMARKS / 'delayed_run.py'} --cache-mb 0",
        f"mmap: {BENCHMARKS / 'plain_mmap.py'}",
    ]
    runs = {r.cell: r for r in run_cells(model, texts, Plan(passes=1, tokens=6, threads=1))}
    assert [run.error for run in runs.values()] == [""] * 4
    counters = {name: run.report["counters"] for name, run in runs.items()}
    assert counters["none"]["decode_misses"] > 0 == counters["resident"]["decode_misses"]
    assert counters["late"]["compute_s_per_token"] >= 0.03  # slept: no machine is faster than that
    assert counters["late"]["decode_misses"] == counters["none"]["decode_misses"]
    # Reads of experts bypass the page cache, so the kernel counts each; the dense weights add up.
    assert runs["none"].kernel_read_bytes >= counters["none"]["bytes_read"] > 0
    assert runs["mmap"].kernel_read_bytes > 0
    assert len(runs["mmap"].report["decode_steps"]["wall_s"]) == 6


@pytest.mark.xdist_group("machine")
def test_memory_limit_holds(model: Path, program: str) -> None:
    limit = 64 * MIB
    try:
        with MemoryLimit(limit) as group:
            assert group.folder.is_dir()
    except SettingsError as error:
        pytest.skip(str(error))
    assert not group.folder.exists()
    texts = [f"small: {program}", f"large: {program} --allocate {4 * limit}"]
    plan = Plan(passes=1, tokens=1, memory_limit=limit)
    runs = {run.cell: run for run in run_cells(model, texts, plan)}
    assert runs["small"].error == "" and 0 < runs["small"].memory["peak_bytes"] <= limit
    assert runs["large"].error == "killed: it needs more than the memory limit"
    assert runs["large"].memory["kills"] == 1


# --- the command ---


def test_command_shows_and_writes_everything(model: Path, program: str, tmp_path: Path) -> None:
    cells = tmp_path / "cells"
    lines = ["# Is b faster?", f"a: {program} --ms 10", f"b: {program} --ms 5 --misses 0"]
    cells.write_text("\n".join([*lines, f"c: {program} --fault exit"]))
    written = tmp_path / "out.json"
    result = invoke(
        model, "--cells", cells, "--passes", 10, "--tokens", 3, "--baseline", "a", "--json", written
    )
    assert result.exit_code == 1
    assert "Is b faster?" in result.stdout and "c: 10 failed: exit status 1" in result.stdout
    assert "win" in result.stdout and "missed < 1%" in result.stdout
    assert result.stderr.count("pass 10, ") == 3
    content: dict[str, Any] = json.loads(written.read_text())
    assert content["planned_runs"] == len(content["runs"]) == 30
    a, b, c = content["summary"]
    assert (b["verdict"], a["verdict"], c["runs"]) == ("win", None, 0)
    assert b["ratios"]["tok_per_s"] == {"pairs": 10, "median": 2.0, "low": 2.0, "high": 2.0}
    assert b["ratios"]["mib_per_token"] == {"not_shown": "missed < 1%"}
    speeds = [
        1 / run["report"]["decode_steps"]["wall_s"][0]
        for run in content["runs"]
        if run["cell"] == "b"
    ]
    assert b["figures"]["tok_per_s"]["median"] == sorted(speeds)[5]


def test_interrupted_command_keeps_what_there_is(model: Path, program: str, tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    # In the order of seed 1 the quick cell is first and the other never ends.
    arguments = [str(model), "--cell", f"quick: {program}", "--json", str(written), "--seed", "1"]
    arguments += ["--tokens", "2", "--cell", f"stuck: {program} --fault hang"]
    code = "import typer; from routeahead.cli.bench import bench; typer.run(bench)"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr and "quick" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate()
    assert process.returncode == 130 and "quick" in stdout
    content = json.loads(written.read_text())
    assert [run["cell"] for run in content["runs"]] == ["quick"] and content["planned_runs"] == 4


def test_command_refuses_what_it_cannot_do(model: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([], "nothing to run"),
        (["--cell", "a:", "--cells", tmp_path / "x"], "not both"),
        (["--cell", "a:", "--json", tmp_path / "none" / "x"], "there is no folder"),
    ):
        result = invoke(model, *arguments)
        assert isinstance(result.exception, SettingsError) and message in str(result.exception)
