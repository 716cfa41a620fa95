"""`--route-trace`: every routing of a run, in the format that `telemetry.route_trace` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.experts.layout import ModelLayout
from routeahead.telemetry.table import open_table
from routeahead.types import Phase

COLUMNS: Mapping[str, str] = {
    "turn": "int64",  # prompts so far
    "phase": "int64",  # 0 = prefill, 1 = decode
    "step": "int64",  # position of the token
    "layer": "int64",
    "slot": "int64",
    "expert": "int64",  # what was routed to
    "weight": "float64",  # after normalisation and scaling, before dropping
    "residency": "int64",  # 1: in the cache when it was routed
    "expert_bytes": "int64",  # charged to the routing that had it read, else 0
    "dropped": "int64",  # 1: not read, and computed with weight 0
    "committed": "int64",  # 1: a policy decided, not the router
    "router_expert": "int64",  # the router's own choice for this slot
}


class RouteLog:
    """Collects a routing when it is decided and writes it when its weights are known."""

    def __init__(self, path: Path, layout: ModelLayout, top_k: int) -> None:
        """
        Raises:
            SettingsError: the file cannot be written.
        """
        self._bytes = layout.bytes_by_layer()
        facts: dict[str, Any] = {
            "model": str(layout.shards[0].path),
            "arch": layout.arch,
            "n_layer": len(self._bytes),
            "n_expert": layout.n_expert,
            "n_expert_used": top_k,
        }
        head = ["route_trace v2", " ".join(f"{key}={value}" for key, value in facts.items())]
        head += [f"layer={layer} expert_bytes={size}" for layer, size in self._bytes.items()]
        self._table = open_table(path, COLUMNS, head, {**facts, "layers": self._bytes})
        self._turn = -1
        self._open: list[list[Any]] = []  # rows of the last routing, slot by slot
        self._weighed = False

    def turn(self) -> None:
        """A new prompt begins."""
        self._turn += 1

    def routed(
        self,
        phase: Phase,
        layer: int,
        positions: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int32],
        router: npt.NDArray[np.int32],
        resident: set[int],
        *,
        committed: bool,
    ) -> None:
        """Records what is known at the top-k.

        Args:
            ids, router: (rows, top-k), what is computed with and what the router chose.
            resident: experts of the layer that were in the cache.
        """
        self._flush()
        self._weighed = False
        code, charged = int(phase == "decode"), set(resident)
        for position, row, own in zip(positions, ids.tolist(), router.tolist(), strict=True):
            for slot, expert in enumerate(row):
                size = 0 if expert in charged else self._bytes[layer]
                charged.add(expert)
                self._open.append(
                    [
                        max(self._turn, 0), code, int(position), layer, slot, expert, float("nan"),
                        int(expert in resident), size, 0, int(committed), own[slot],
                    ]
                )  # fmt: skip

    def weights(self, weights: npt.NDArray[np.float32]) -> None:
        """The weights (rows, top-k) of the routing that was recorded last."""
        if self._weighed:  # by who is going to drop some of them
            return
        self._weighed = True
        for record, weight in zip(self._open, weights.ravel().tolist(), strict=True):
            record[6] = round(weight, 7)

    def dropped(self, dropped: npt.NDArray[np.bool_]) -> None:
        """Slots (rows, top-k) of the routing that was recorded last."""
        for record, gone in zip(self._open, dropped.ravel().tolist(), strict=True):
            if gone:
                record[8:10] = 0, 1  # bytes charged, dropped

    def _flush(self) -> None:
        self._table.add(self._open)
        self._open = []

    def close(self) -> None:
        self._flush()
        self._table.close()
