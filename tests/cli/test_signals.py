"""Signals at any moment of a command: it ends, its status says why, and nothing stays behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import psutil
import pytest

from routeahead.machine.cgroup import own_hierarchy

pytestmark = pytest.mark.xdist_group("machine")

COMMAND = [sys.executable, "-m", "routeahead.cli.main"]
RUN = ["run", "--raw", "-p", "Once", "-n", "4000", "--cache-mb", "1", "--throttle", "20", "-t", "1"]
SLOW = ["--dense", "mmap"]  # the throttle does not hold up the load


def start(*arguments: object, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,  # type: ignore[call-overload]
    )


def stop(process: subprocess.Popen[str], number: int) -> tuple[str, str]:
    process.send_signal(number)
    try:
        return process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"hangs after {signal.Signals(number).name}")


def stdout(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout
    return process.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_open_is_written(tmp_path: Path, number: int) -> None:
    """The report, and every line of a CSV of which 32 are collected."""
    report, csv = tmp_path / "report.json", tmp_path / "steps.csv"
    process = start(*RUN, *SLOW, "--report", report, "--csv", csv)
    stdout(process).read(8)
    _, errors = stop(process, number)
    assert process.returncode == 128 + number and "Traceback" not in errors
    tokens = json.loads(report.read_text())["tokens"]
    lines = csv.read_text().splitlines()
    rows = [line for line in lines if line[0].isdigit()]
    assert lines[-1] == rows[-1]
    assert len(tokens) - 1 <= len(rows) <= len(tokens) + 1


def test_an_interrupt_while_modules_are_imported_prints_nothing(tmp_path: Path) -> None:
    """At the import of llama.cpp, which a module of that name here stands for."""
    (tmp_path / "llama_cpp.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = start(*RUN, env={**os.environ, "PYTHONPATH": path})
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT and errors == ""


def test_a_signal_while_an_import_makes_a_class_keeps_its_number(tmp_path: Path) -> None:
    """Named tuples and dataclasses are made by `exec`; CPython dies of SIGINT after that."""
    (tmp_path / "llama_cpp.py").write_text(
        "import os, signal, time\nexec('os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)')\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = start(*RUN, env={**os.environ, "PYTHONPATH": path})
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_bench_that_is_terminated_leaves_no_process_and_no_group(tmp_path: Path) -> None:
    hierarchy = own_hierarchy()
    if hierarchy is None or not os.access(hierarchy.parent, os.W_OK):
        pytest.skip("no control group can be made here")
    process = start(
        "bench", "--memory-limit", "900", "--cell", "slow:--throttle 1 --cache-mb 1", "-t", "1"
    )
    group = hierarchy.parent / f"routeahead-{process.pid}-0"
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(process.pid).children(recursive=True)) or (
        children[0].name() == "sh"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    assert group.exists()
    _, errors = stop(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in errors
    assert not any(child.is_running() for child in children) and not group.exists()


def test_an_interrupt_in_the_middle_of_the_load_is_not_lost() -> None:
    """It arrives while llama.cpp calls back for a tensor."""
    script = (
        "import os, signal, sys\n"
        "from routeahead.llamacpp.placement import Placement\n"
        "name, at = sys.argv[1], int(sys.argv[2])\n"
        "original, calls = getattr(Placement, name), 0\n"
        "def struck(self, *arguments):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == at: signal.raise_signal(signal.SIGINT)\n"
        "    return original(self, *arguments)\n"
        "setattr(Placement, name, struck)\n"
        "from routeahead import Llama\n"
        "from routeahead.models import DEFAULT_MODEL\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try: Llama(DEFAULT_MODEL, n_ctx=64, n_threads=1, cache_mb=8)\n"
        "except KeyboardInterrupt: print('interrupted')\n"
        "Llama(DEFAULT_MODEL, n_ctx=64, n_threads=1, cache_mb=8).close()\n"
    )
    for name, at in (("_alloc_buffer", 1), ("_init_tensor", 1), ("_init_tensor", 20)):
        command = [sys.executable, "-c", script, name, str(at)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "interrupted\n"), (name, at, done.stderr)


def strike(seed: int, tmp_path: Path, longest_s: float) -> None:
    """One command, one signal, one moment: the status says it, and all files are whole."""
    rng = random.Random(seed)
    number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    verb = rng.choice(["run", "eval", "bench"])
    out = tmp_path / f"{seed}.json"
    if verb == "run":
        process = start(*RUN, *SLOW, "--report", out)
    elif verb == "eval":
        text = tmp_path / "text.txt"
        text.write_text("Add seven and eight. " * 200)
        work = ["--work", tmp_path / "work", "--json", out, "-t", 1, "-c", 64]
        cached = ["--setting", "small:--cache-mb 1", "--max-tokens", 2000]
        process = start("eval", "--text", text, *cached, *work)
    else:
        cells = ["--cell", "a:--cache-mb 1 --throttle 30", "--cell", "b:--cache-mb 2"]
        process = start("bench", *cells, "--passes", 50, "--json", out, "-t", 1)
    time.sleep(rng.uniform(0.5, longest_s))  # not while Python itself starts
    _, errors = stop(process, number)
    where = f"seed {seed}: {verb}, {number!r}, {errors}"
    # In the first and last moments the default action, which is to die of it, is in place.
    assert process.returncode in (-number, 128 + number), where
    assert "Traceback" not in errors, where
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text())  # complete or absent


@pytest.mark.parametrize("seed", range(4))
def test_a_signal_at_some_moment(tmp_path: Path, seed: int) -> None:
    strike(seed, tmp_path, 4.0)


@pytest.mark.slow
def test_a_signal_at_any_moment(tmp_path: Path) -> None:
    for seed in range(100, 200):
        strike(seed, tmp_path, 5.0)
