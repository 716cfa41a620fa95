"""`--route-trace`: every routing of a run, in the format that `telemetry.route_trace` reads."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.experts.layout import ModelLayout
from routeahead.telemetry.table import open_table
from routeahead.types import Floats, Ids, Phase

COLUMNS: Mapping[str, str] = {
    "turn": "int64",  # prompts so far
    "phase": "int64",  # 0 = prefill, 1 = decode
    "step": "int64",  # position of the token
    "layer": "int64",
    "slot": "int64",
    "expert": "int64",  # what was routed to
    "weight": "float64",  # after normalisation and scaling, before dropping
    "residency": "int64",  # 1: in the cache when it was routed
    "expert_bytes": "int64",  # of the slot that had the expert read; 0 for the others
    "dropped": "int64",  # 1: not read, and computed with weight 0
    "committed": "int64",  # 1: a policy decided, not the router
    "router_expert": "int64",  # the router's own choice for this slot; -1: it was not asked
}
UNKNOWN = -1
SCORES = "scores"
"""A further column, if it is asked for: what the router ranked all experts by. On the first slot of
each token; base64 of little-endian float16, as long as the model has experts."""


Scores = Callable[[], Floats | None]

# Lines that are collected at most, but for the last routing's. (A prompt has many in one batch.)
_LINES = 16384


class RouteLog:
    """Collects routings, column by column, and writes those of a batch when the batch ends.

    By then the weights of each, and what was dropped from it, are known.
    """

    def __init__(
        self, path: Path, layout: ModelLayout, top_k: int, *, scoring: bool = False
    ) -> None:
        """
        Begins the file.

        Args:
            scoring: it has the column SCORES.

        Raises:
            SettingsError: the file cannot be written.
        """
        self._bytes = layout.bytes_by_layer()
        facts: dict[str, Any] = {
            "format": "route_trace v3",
            "model": str(layout.shards[0].path),
            "arch": layout.arch,
            "n_layer": len(self._bytes),
            "n_expert": layout.n_expert,
            "n_expert_used": top_k,
            "layers": self._bytes,
        }
        columns = {**COLUMNS, SCORES: "string"} if scoring else COLUMNS
        self._table, self._scoring = open_table(path, columns, facts), scoring
        self._turn = -1
        self._columns: dict[str, list[Any]] = {name: [] for name in columns}
        self._first = 0  # where the last routing begins in them
        self._weighed = False

    def turn(self) -> None:
        """A new prompt begins."""
        self._turn += 1

    def routed(
        self,
        phase: Phase,
        layer: int,
        positions: npt.NDArray[np.int64],
        ids: Ids,
        router: Ids,
        resident: set[int],
        scores: Scores,
        *,
        committed: bool,
    ) -> None:
        """Records what is known at the top-k.

        Args:
            ids, router: (rows, top-k), what is computed with and what the router chose
                (`UNKNOWN` where its product served another layer).
            resident: experts of the layer that were in the cache.
            scores: gives what the router ranked by, (rows, n_expert), or None; see SCORES.
        """
        self._weighed = False
        self._first = len(self._columns["expert"])
        if self._first >= _LINES:
            self._write()
        rows, top_k = ids.shape
        experts, size, charged = ids.ravel().tolist(), self._bytes[layer], set(resident)
        count = len(experts)
        bytes_read = []
        for expert in experts:
            bytes_read.append(0 if expert in charged else size)
            charged.add(expert)
        for column, values in zip(
            (self._columns[name] for name in COLUMNS),
            (
                [max(self._turn, 0)] * count,
                [int(phase == "decode")] * count,
                np.repeat(positions, top_k).tolist(),
                [layer] * count,
                [*range(top_k)] * rows,
                experts,
                [float("nan")] * count,
                [int(expert in resident) for expert in experts],
                bytes_read,
                [0] * count,
                [int(committed)] * count,
                router.ravel().tolist(),
            ),
            strict=True,
        ):
            column.extend(values)
        if self._scoring:
            ranked = scores()
            for row in range(rows):
                text = None if ranked is None else _encoded(ranked[row])
                self._columns[SCORES] += [text, *[None] * (top_k - 1)]

    def weights(self, weights: Floats) -> None:
        """The weights (rows, top-k) of the routing that was recorded last."""
        if self._weighed:  # before some of its experts are dropped
            return
        self._weighed = True
        column = self._columns["weight"]
        lines = range(self._first, len(column))
        for line, weight in zip(lines, weights.ravel().tolist(), strict=True):
            column[line] = round(weight, 7)

    def dropped(self, dropped: npt.NDArray[np.bool_]) -> None:
        """Slots (rows, top-k) of the routing that was recorded last."""
        for index in np.flatnonzero(dropped):
            self._columns["expert_bytes"][self._first + index] = 0
            self._columns["dropped"][self._first + index] = 1

    def end_of_batch(self) -> None:
        """The batch was evaluated: nothing more will be known of its routings."""
        self._write()

    def _write(self) -> None:
        if self._columns["expert"]:
            self._table.add(list(self._columns.values()))
            self._columns = {name: [] for name in self._columns}
        self._first = 0

    def close(self) -> None:
        self._write()
        self._table.close()


def _encoded(scores: Floats) -> str:
    with np.errstate(over="ignore"):  # beyond 65504: infinite
        return base64.b64encode(scores.astype("<f2").tobytes()).decode()
