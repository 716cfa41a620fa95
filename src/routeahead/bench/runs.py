"""The interleaved benchmark: every cell in every pass, each run a fresh process.

A machine's speed drifts: it heats up, its disk's cache fills, others use it. If all runs of one
cell came after all runs of another, their difference would be the drift; in turn (A B, B A,
A B ...) both have the same drift.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from routeahead.bench.cells import Cell, CellList, check_cells, expand_shares, run_order
from routeahead.bench.machine_state import busy_cpu_s, describe, drop_page_cache, entry_state
from routeahead.bench.memory_limit import MemoryLimit
from routeahead.cluster import Cluster
from routeahead.errors import SettingsError
from routeahead.experts.layout import ModelLayout

# getrusage counts reads in blocks of this size, whatever the disk's are.
_RUSAGE_BLOCK = 512


@dataclass(frozen=True)
class Plan:
    """What every run of a benchmark has in common.

    Attributes:
        passes: runs of each cell.
        tokens: decoded tokens that count.
        warmup: decoded tokens before them that do not.
        threads: compute threads; None for the program's default.
        seed: of the tokens that are fed and of the order of the cells.
        memory_limit: bytes that a run may use, page cache included; None for no limit.
    """

    passes: int = 2
    tokens: int = 64
    warmup: int = 0
    threads: int | None = None
    seed: int = 0
    memory_limit: int | None = None

    def flags(self, report: Path) -> list[str]:
        """The arguments that every cell's program gets before its own."""
        count = ["-n", str(self.warmup + self.tokens)]
        threads = [] if self.threads is None else ["-t", str(self.threads)]
        return ["--forced-tokens", f"seed:{self.seed}", *count, *threads, "--report", str(report)]


@dataclass
class Run:
    """One process of one cell.

    Attributes:
        pass_index, position: which pass, and the place within it, from 0.
        command: as it was started.
        machine: state before it (`machine_state.entry_state`).
        page_cache: what dropping the model from it gave (`machine_state.drop_page_cache`).
        wall_s: start to end of the process.
        others_cpu_s: CPU time that other processes took meanwhile.
        kernel_read_bytes: what its process had the disk read, as the kernel counted it.
        memory: peak bytes and kills of its control group; empty without a limit.
        error: why it does not count; empty if it does.
        report: what it wrote with --report; empty if it wrote none.
    """

    cell: str
    pass_index: int
    position: int
    command: list[str]
    machine: dict[str, Any]
    page_cache: dict[str, Any]
    wall_s: float
    others_cpu_s: float
    kernel_read_bytes: int
    memory: dict[str, Any]
    error: str
    report: dict[str, Any]


class Bench:
    """A benchmark. Each step of an iteration over it is one run.

    `as_dict` gives the runs so far at any time.

    Attributes:
        baseline: name of the cell that the others are compared with.
        runs: so far, in the order they ran.
    """

    def __init__(
        self, layout: ModelLayout, cells: CellList, plan: Plan, baseline: str | None = None
    ) -> None:
        """Plans the runs; `baseline` is the first cell if not given.

        Raises:
            SettingsError: no cells, two of one name, or no such baseline.
        """
        self.baseline = check_cells(cells.cells, baseline)
        self.layout, self.cells, self.plan = layout, cells, plan
        self._order = run_order(len(cells.cells), plan.passes, plan.seed)
        self.runs: list[Run] = []

    def __len__(self) -> int:
        return self.plan.passes * len(self.cells.cells)

    def __iter__(self) -> Iterator[Run]:
        for index in range(self.plan.passes):
            for run in self._pass(index):
                self.runs.append(run)
                yield run

    def spread(self, cluster: Cluster) -> Iterator[Run]:
        """The same runs on the nodes of a cluster, each pass on one node: pairs of runs are
        compared within a pass, so that no ratio is between two machines.

        Raises:
            RouteAheadError: a node lacks something.
        """
        jobs = [
            (self.layout, self.cells, self.plan, self.baseline, index, sys.executable)
            for index in range(self.plan.passes)
        ]
        for _, [runs] in cluster.map(one_pass, jobs):
            for run in runs:
                run.error = run.error or self._fault(run.report)
                self.runs.append(run)
                yield run

    def _pass(self, index: int) -> Iterator[Run]:
        for position, number in enumerate(self._order[index]):
            yield self._run(self.cells.cells[number], index, position)

    def _run(self, cell: Cell, index: int, position: int) -> Run:
        machine = entry_state(self.layout.shards)
        page_cache = drop_page_cache(self.layout.shards)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            model = str(self.layout.shards[0].path)
            flags = [*self.plan.flags(report), *expand_shares(cell.flags, self.layout)]
            command = [*cell.program, model, *flags]
            process = _execute(command, environment(cell), self.plan.memory_limit)
            content, error = _read_report(report, process)
        return Run(
            cell=cell.name,
            pass_index=index,
            position=position,
            command=command,
            machine=machine,
            page_cache=page_cache,
            wall_s=process.wall_s,
            others_cpu_s=process.others_cpu_s,
            kernel_read_bytes=process.read_bytes,
            memory=process.memory,
            error=error or self._fault(content),
            report=content,
        )

    def _fault(self, report: dict[str, Any]) -> str:
        """Why a report cannot be compared with the others; empty if it can."""
        missing = [key for key in ("tokens", "decode_steps") if key not in report]
        if missing:
            return f"its report has no {missing[0]}"
        expected = self.plan.warmup + self.plan.tokens
        if len(report["tokens"]) != expected:
            return f"decoded {len(report['tokens'])} tokens and not {expected}"
        first = next((run for run in self.runs if not run.error), None)
        if first and first.report["tokens"] != report["tokens"]:
            return f"decoded other tokens than the first run ({first.cell})"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """All that was measured, from which each figure can be computed again."""
        return {
            "question": self.cells.question,
            "model": str(self.layout.shards[0].path),
            "file_bytes": self.layout.file_bytes,
            "machine": describe(),
            "plan": asdict(self.plan),
            "baseline": self.baseline,
            "planned_runs": len(self),
            "cells": [asdict(cell) for cell in self.cells.cells],
            "runs": [asdict(run) for run in self.runs],
        }


def one_pass(
    layout: ModelLayout, cells: CellList, plan: Plan, baseline: str, index: int, python: str
) -> list[Run]:
    """On a node: the runs of one pass, in its order. `python` is what the cells were made with."""
    here = [
        replace(cell, program=(sys.executable, *cell.program[1:]))
        if cell.program[0] == python
        else cell
        for cell in cells.cells
    ]
    bench = Bench(layout, CellList(cells.question, here), plan, baseline)
    found = []
    for run in bench._pass(index):
        run.machine["node"] = platform.node()
        bench.runs.append(run)
        found.append(run)
    return found


def environment(cell: Cell) -> dict[str, str]:
    """This process's environment, and what the cell sets.

    GOMP_SPINCOUNT is left out: importing this package sets it, and a program that does not import
    it would inherit it, so that plain llama.cpp would be measured with this package's setting. The
    user's own defaults (`config.toml`, ROUTEAHEAD_*) are left out, too: a cell is what it says.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "GOMP_SPINCOUNT" and not name.startswith("ROUTEAHEAD_")
    }
    return inherited | {"ROUTEAHEAD_CONFIG": os.devnull} | cell.environment


@dataclass
class _Process:
    """A process that has ended: its output and what it used."""

    status: int
    stderr: str
    wall_s: float
    others_cpu_s: float
    read_bytes: int
    memory: dict[str, Any]


def _execute(command: Sequence[str], env: dict[str, str], memory_limit: int | None) -> _Process:
    """Runs a command to its end, in a group of its own if there is a memory limit.

    Raises:
        SettingsError: the program cannot be started, or the memory limit is not permitted.
    """
    with nullcontext() if memory_limit is None else MemoryLimit(memory_limit) as group:
        before = _reading()
        try:
            ended = subprocess.run(
                group.wrap(command) if group else command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise SettingsError(f"cannot start {command[0]}: {error.strerror}") from None
        wall, busy, own, blocks = (now - then for now, then in zip(_reading(), before, strict=True))
        memory = {"peak_bytes": group.peak_bytes(), "kills": group.kills()} if group else {}
    return _Process(
        status=ended.returncode,
        stderr=ended.stderr,
        wall_s=wall,
        others_cpu_s=max(0.0, busy - own),
        read_bytes=int(blocks) * _RUSAGE_BLOCK,
        memory=memory,
    )


def _reading() -> tuple[float, float, float, int]:
    """Time, CPU seconds of the machine, CPU seconds and blocks read of all children so far.

    A child's /proc/<pid>/io no longer exists when it has ended; these totals then include it.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = children.ru_utime + children.ru_stime
    return time.perf_counter(), busy_cpu_s(), own, children.ru_inblock


def _read_report(path: Path, process: _Process) -> tuple[dict[str, Any], str]:
    """Reads a run's report: (report, error), of which one is empty."""
    if process.memory.get("kills"):
        return {}, "killed: it needs more than the memory limit"
    if process.status:
        last = process.stderr.strip().rpartition("\n")[2]
        return {}, f"exit status {process.status}: {last or 'nothing on stderr'}"
    try:
        return json.loads(path.read_text()), ""
    except (OSError, ValueError) as error:
        return {}, f"wrote no report: {error}"
