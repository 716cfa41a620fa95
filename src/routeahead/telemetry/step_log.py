"""`--csv`: one line a decoded batch, which is a token, and several where guesses were right.

When the run has ended, its facts have the `means`: each column's sum over the number of tokens, so
that all of them, route-ahead's costs too, are over the same tokens.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from routeahead.telemetry.counters import Totals
from routeahead.telemetry.table import open_table

_MS = ("wall_s", "compute_s", "stall_s", "io_s", "mgmt_s", "adopt_s", "cpu_s")
_COUNTS = ("bytes_read", "reads", "hits", "misses", "drafted", "accepted")
# Of policies: 0 where there is none.
_POLICIES_MS = ("gemv_s", "issue_s", "wait_s", "watchdog_s")
_POLICIES = (
    "evictions", "rereads", "early_bytes", "dropped", "committed", "passed_through",
    "compared_slots", "agreed_slots",
)  # fmt: skip
COLUMNS: Mapping[str, str] = {
    "token": "int64",  # nosec B105
    **{f"{name[:-2]}_ms": "float64" for name in _MS},
    **dict.fromkeys((*_COUNTS, "major_faults", *_POLICIES), "int64"),
    **{f"ra_{name[:-2]}_ms": "float64" for name in _POLICIES_MS},
}
# Lines that are written together: writing one takes as long as collecting ten. A run that is killed
# loses at most as many.
_LINES = 32
_ACCEPTED = [*COLUMNS].index("accepted")


class StepLog:
    """Writes a line a token; the table's facts are every setting and version."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Begins the file.

        Raises:
            SettingsError: the file cannot be written.
        """
        self._table = open_table(path, COLUMNS, facts)
        self._lines: list[list[float | int]] = []
        self._sums = [0.0] * len(COLUMNS)  # of the lines that were written
        self._tokens, self._faults = 0, _major_faults()

    def add(self, step: Totals) -> None:
        """Records one decoded step."""
        if len(self._lines) >= _LINES:
            self._write()
        self._tokens += step.kept
        faults = _major_faults()
        self._lines.append(
            [
                self._tokens,
                *_ms(step, _MS),
                *(getattr(step, name) for name in _COUNTS),
                faults - self._faults,
                *(getattr(step, name) for name in _POLICIES),
                *_ms(step, _POLICIES_MS),
            ]
        )
        self._faults = faults

    def accepted(self) -> None:
        """One of the last step's guesses was right."""
        self._tokens += 1
        if self._lines:
            self._lines[-1][0] = self._tokens
            self._lines[-1][_ACCEPTED] += 1

    def _take(self) -> list[tuple[float | int, ...]]:
        """The lines that were collected, as columns."""
        columns, self._lines = list(zip(*self._lines, strict=True)), []
        pairs = zip(columns, self._sums, strict=True)
        self._sums = [sum(column, before) for column, before in pairs]
        return columns

    def _write(self) -> None:
        self._table.add(self._take())

    def close(self) -> None:
        """Writes what was collected, and the means."""
        try:
            if self._lines:  # else no token was decoded: `add` keeps the latest
                columns = self._take()
                _, *sums = zip(COLUMNS, self._sums, strict=True)  # without the token's number
                means = {name: round(total / max(1, self._tokens), 6) for name, total in sums}
                self._table.conclude(columns, {"means": means})
        finally:
            self._table.close()


def _ms(step: Totals, names: Sequence[str]) -> list[float]:
    return [round(1e3 * float(getattr(step, name)), 4) for name in names]


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
