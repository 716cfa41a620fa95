"""The files of recorded runs, told apart by what is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.errors import SettingsError
from routeahead.telemetry import io_trace, route_trace, step_log
from routeahead.telemetry.route_trace import RouteTrace
from routeahead.telemetry.table import PARQUET, read_arrow, read_table

Columns = Mapping[str, npt.NDArray[Any]]
_SUFFIXES = (".json", ".csv", PARQUET)
_STEP_TIMES = ("wall", "compute", "stall", "mgmt")
_STEP_COUNTS = ("bytes_read", "hits", "misses")
# Columns by which a table is recognised, and the field of `Run` that it becomes.
_KINDS = {
    "steps": set(step_log.COLUMNS) - {"major_faults"},
    "reads": set(io_trace.COLUMNS),
    "routes": set(route_trace.COLUMNS),
}
_WANTED = "a file of `run --report`, --csv, --io-trace or --route-trace"


@dataclass(frozen=True)
class Routes:
    """A routing trace.

    Attributes:
        trace: to be replayed.
        committed, router: int64 by routed slot, whether a policy decided and what the router had
            chosen; None in traces that do not say.
    """

    trace: RouteTrace
    committed: npt.NDArray[np.int64] | None = None
    router: npt.NDArray[np.int64] | None = None


@dataclass
class Run:
    """What is known of a run.

    Attributes:
        report: of `--report`; empty if there is none.
        steps: by decoded token: `wall`, `compute`, `stall` and `mgmt` in ms, `bytes_read`, `hits`,
            `misses`; empty if neither a report nor a CSV has them.
        reads: of the I/O trace (`io_trace.COLUMNS`).
        routes: of the routing trace.
        files: kind → where it was read.
    """

    name: str
    report: Mapping[str, Any] = field(default_factory=dict)
    steps: Columns = field(default_factory=dict)
    reads: Columns | None = None
    routes: Routes | None = None
    files: dict[str, Path] = field(default_factory=dict)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads runs.

    A folder is a run. Of files, one begins another run if its predecessors in the same run already
    have one of its kind: `a.json a.csv b.json b.csv` are two.

    Raises:
        SettingsError: a file is of no kind that belongs to a run, or damaged; a folder has none, or
            two of a kind.
    """
    runs: list[Run] = []
    loose: Run | None = None
    for path in paths:
        if path.is_dir():
            runs.append(_read_folder(path))
            loose = None
            continue
        kind = _kind(path)
        if loose is None or kind in loose.files:
            loose = Run(path.stem)
            runs.append(loose)
        _add(loose, kind, path)
    for index, run in enumerate(runs):
        run.name = _distinct(run.name, [one.name for one in runs[:index]])
    return runs


def _distinct(name: str, others: Sequence[str]) -> str:
    number = 2
    found = name
    while found in others:
        found = f"{name} ({number})"
        number += 1
    return found


def _read_folder(folder: Path) -> Run:
    run = Run(folder.resolve().name)
    for path in sorted(one for one in folder.iterdir() if one.suffix in _SUFFIXES):
        kind = _kind(path)
        if kind in run.files:
            raise SettingsError(
                f"{folder}: {run.files[kind].name} and {path.name} are of one kind: "
                "give each run a folder of its own, or name the files"
            )
        _add(run, kind, path)
    if not run.files:
        raise SettingsError(f"{folder}: no file of a run in it: {_WANTED}")
    return run


def _kind(path: Path) -> str:
    if path.suffix == ".json":
        return "report"
    if path.suffix not in _SUFFIXES:
        raise SettingsError(f"{path}: give {_WANTED}")
    try:
        names = set(read_arrow(path)[0].column_names)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {_reason(error)}") from None
    found = [kind for kind, columns in _KINDS.items() if columns <= names]
    if not found:
        raise SettingsError(f"{path}: it has the columns of no table that a run writes")
    return found[0]


def _add(run: Run, kind: str, path: Path) -> None:
    try:
        match kind:
            case "report":
                run.report = _read_report(path)
                run.steps = run.steps or _steps_of(run.report)
            case "steps":
                run.steps = _read_steps(path)
            case "reads":
                run.reads = io_trace.read_io_trace(path)
            case "routes":
                run.routes = _read_routes(path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {_reason(error)}") from None
    run.files[kind] = path


def _reason(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def _read_report(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not {"counters", "decode_steps"} <= content.keys():
        raise ValueError("not a report of `run --report`")
    return content


def _steps_of(report: Mapping[str, Any]) -> Columns:
    """The report's own columns by token; () where its form is not what `run` writes."""
    found = report["decode_steps"]
    try:
        times = {name: 1e3 * np.asarray(found[f"{name}_s"], float) for name in _STEP_TIMES}
        counts = {name: np.asarray(found[name], np.int64) for name in _STEP_COUNTS}
    except (KeyError, TypeError, ValueError):
        raise ValueError("its decode_steps are not those of `run --report`") from None
    if len({len(column) for column in (*times.values(), *counts.values())}) > 1:
        raise ValueError("its decode_steps are not equally long")
    return times | counts if len(times["wall"]) else {}


def _read_steps(path: Path) -> Columns:
    columns = read_table(path, step_log.COLUMNS).columns
    times = {name: columns[f"{name}_ms"] for name in _STEP_TIMES}
    return times | {name: columns[name] for name in _STEP_COUNTS} if len(times["wall"]) else {}


def _read_routes(path: Path) -> Routes:
    trace = route_trace.read_trace(path)
    try:
        columns = read_table(path, {"committed": "int64", "router_expert": "int64"}).columns
    except ValueError:  # of a version, or a program, that did not write them
        return Routes(trace)
    return Routes(trace, columns["committed"], columns["router_expert"])
