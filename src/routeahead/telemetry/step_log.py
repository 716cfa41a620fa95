"""`--csv`: one row a decoded token."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routeahead.telemetry.counters import Totals
from routeahead.telemetry.table import CsvTable

_MS = ("wall_s", "compute_s", "stall_s", "io_s", "mgmt_s", "adopt_s", "cpu_s")
_COUNTS = ("bytes_read", "reads", "hits", "misses")
COLUMNS = ["token", *(f"{name[:-2]}_ms" for name in _MS), *_COUNTS, "major_faults"]


class StepLog:
    """Writes a preamble (every setting and version), a row a token, and a trailer with totals."""

    def __init__(self, path: Path, preamble: Mapping[str, Any]) -> None:
        """
        Raises:
            SettingsError: the file cannot be written.
        """
        head = [f"{key}={json.dumps(value)}" for key, value in preamble.items()]
        self._table = CsvTable(path, COLUMNS, head)
        self._sum = Totals()
        self._faults = self._first_fault = _major_faults()

    def add(self, step: Totals) -> None:
        """Records one decoded step."""
        self._sum.add(step)
        faults = _major_faults()
        self._table.add([[self._sum.tokens, *_cells(step), faults - self._faults]])
        self._faults = faults

    def close(self) -> None:
        cells = [self._sum.tokens, *_cells(self._sum), self._faults - self._first_fault]
        totals = dict(zip(COLUMNS, cells, strict=True))
        self._table.comment(f"totals={json.dumps(totals)}")
        self._table.close()


def _cells(step: Totals) -> list[float | int]:
    times = [round(1e3 * float(getattr(step, name)), 4) for name in _MS]
    return [*times, *(getattr(step, name) for name in _COUNTS)]


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
