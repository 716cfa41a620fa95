"""`--csv`: one line a decoded token."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routeahead.telemetry.counters import Totals
from routeahead.telemetry.table import open_table

_MS = ("wall_s", "compute_s", "stall_s", "io_s", "mgmt_s", "adopt_s", "cpu_s")
_COUNTS = ("bytes_read", "reads", "hits", "misses")
COLUMNS: Mapping[str, str] = {
    "token": "int64",
    **{f"{name[:-2]}_ms": "float64" for name in _MS},
    **dict.fromkeys((*_COUNTS, "major_faults"), "int64"),
}
# Lines that are written together: writing one takes as long as collecting ten. A run that is killed
# loses at most as many.
_LINES = 32


class StepLog:
    """Writes a line a token; the table's facts are every setting and version."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Begins the file.

        Raises:
            SettingsError: the file cannot be written.
        """
        self._table = open_table(path, COLUMNS, facts)
        self._lines: list[list[float | int]] = []
        self._tokens, self._faults = 0, _major_faults()

    def add(self, step: Totals) -> None:
        """Records one decoded step."""
        self._tokens += step.tokens
        faults = _major_faults()
        self._lines.append([self._tokens, *_cells(step), faults - self._faults])
        self._faults = faults
        if len(self._lines) == _LINES:
            self._write()

    def _write(self) -> None:
        if self._lines:
            self._table.add(list(zip(*self._lines, strict=True)))
            self._lines = []

    def close(self) -> None:
        """Writes what was collected."""
        try:
            self._write()
        finally:
            self._table.close()


def _cells(step: Totals) -> list[float | int]:
    times = [round(1e3 * float(getattr(step, name)), 4) for name in _MS]
    return [*times, *(getattr(step, name) for name in _COUNTS)]


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
