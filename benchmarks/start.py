"""How long `serve` and `chat` take to start: until requests are taken, and until a line is read.

    python benchmarks/start.py [MODEL] [--runs 5]

The two are started in turn, once before it counts (files are in the page cache then, and the node
filter's machine code on disk). Prints medians and extremes of seconds passed and processor time.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from routeahead.models import DEFAULT_MODEL

PROGRAM = [sys.executable, "-m", "routeahead"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {"serve": [], "chat": []}
    for index in range(given.runs + 1):
        for verb, start in (("serve", serve), ("chat", chat)):
            taken = start(given.model)
            if index:
                times[verb].append(taken)
    for verb, taken in times.items():
        wall, cpu = zip(*taken, strict=True)
        print(f"{verb}: {spread(wall)} s until it takes input, {spread(cpu)} s of processor time")


def spread(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def serve(model: Path) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as prompts:
        flags = ["--port", "0", "--prompt-cache", prompts, "-t", "1", "--cache-mb", "auto"]
        began = time.perf_counter()
        process = subprocess.Popen(
            [*PROGRAM, "serve", str(model), *flags], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr
        while not (line := process.stderr.readline()).startswith("serving "):
            if not line:
                sys.exit("serve has ended")
        wall, cpu = time.perf_counter() - began, cpu_of(process.pid)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        return wall, cpu


def chat(model: Path) -> tuple[float, float]:
    """Until it has read from its input and, as that is empty, ends."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [*PROGRAM, "chat", str(model), "-t", "1"]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu_of(pid: int) -> float:
    """Processor seconds of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
