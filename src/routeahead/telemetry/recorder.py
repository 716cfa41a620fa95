"""The traces that a run was asked to write, as one object that the engine reports to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeahead.experts.layout import ModelLayout
from routeahead.telemetry.counters import Totals
from routeahead.telemetry.io_trace import IoTrace
from routeahead.telemetry.route_log import RouteLog
from routeahead.telemetry.step_log import StepLog
from routeahead.types import Phase


@dataclass(frozen=True)
class Outputs:
    """Files to write; what is None is not written and costs nothing.

    Attributes:
        route_scores: the routing trace has a column for the scores of all experts.
    """

    csv: Path | None = None
    io_trace: Path | None = None
    route_trace: Path | None = None
    route_scores: bool = False

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.csv, self.io_trace, self.route_trace) if path]


NOTHING = Outputs()


class Recorder:
    """Opens the files of `outputs`, passes events on to them, and closes them."""

    def __init__(
        self, outputs: Outputs, layout: ModelLayout, top_k: int, preamble: Mapping[str, Any]
    ) -> None:
        """Opens the files.

        Raises:
            SettingsError: a file cannot be written.
        """
        self._closers = contextlib.ExitStack()
        self.steps: StepLog | None = None
        self.io: IoTrace | None = None
        self.routes: RouteLog | None = None
        if outputs.csv:
            self.steps = StepLog(outputs.csv, preamble)
            self._closers.callback(self.steps.close)
        if outputs.io_trace:
            self.io = IoTrace(outputs.io_trace, time.perf_counter())
            self._closers.callback(self.io.close)
        if outputs.route_trace:
            self.routes = RouteLog(outputs.route_trace, layout, top_k, scoring=outputs.route_scores)
            self._closers.callback(self.routes.close)

    def end_of_batch(self, phase: Phase, step: Totals) -> None:
        if self.io:
            self.io.end_of_batch(phase, step.kept)
        if self.routes:
            self.routes.end_of_batch()
        if self.steps and phase == "decode":
            self.steps.add(step)

    def accepted(self) -> None:
        """A guess of the last batch was right."""
        if self.io:
            self.io.accepted()
        if self.steps:
            self.steps.accepted()

    def close(self) -> None:
        self._closers.close()
