"""Calibrated routers: matrices that predict a layer's routing from an earlier hidden vector.

`routeahead calibrate` fits them (`calibration/`, docs/calibration.md), and route-ahead uses them in
the place of the layer's own router, which was trained for another vector. Each has the shape of
the router's matrix, so that it costs the same, and the graph can compute it as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from routeahead.errors import SettingsError
from routeahead.telemetry.tensor_file import Tensors, read_tensors, write_tensors
from routeahead.types import Floats

_FORMAT = "routeahead gates 1"


@dataclass(frozen=True)
class Gate:
    """What predicts one layer's routing at one depth.

    Attributes:
        layer: whose experts are predicted.
        depth: how many MoE layers early; HALF: from what the layer's own attention is given.
        matrix: float32 (n_expert, width); None if the layer's own router predicted as well.
        stale: share of slots that the layer's own router predicted, of held-out documents.
        agreement: the same of what is used here.
        penalty: the ridge's, relative to the mean square of a hidden vector's numbers; None with no
            matrix.
    """

    layer: int
    depth: float
    matrix: Floats | None
    stale: float
    agreement: float
    penalty: float | None

    @property
    def name(self) -> str:
        return f"blk.{self.layer}.depth.{self.depth}"


@dataclass(frozen=True)
class Gates:
    """All that was calibrated for one model.

    Attributes:
        model: its fingerprint.
        gates: by layer and depth.
        fitted, held: tokens that the matrices were fitted on, and those of held-out documents.
    """

    model: str
    gates: dict[tuple[int, float], Gate]
    fitted: int
    held: int

    @staticmethod
    def of(model: str, gates: Iterable[Gate], *, fitted: int, held: int) -> Gates:
        by_place = {(gate.layer, gate.depth): gate for gate in gates}
        return Gates(model, by_place, fitted, held)

    @property
    def depths(self) -> list[float]:
        return sorted({depth for _, depth in self.gates})

    def at(self, depth: float) -> dict[int, Gate]:
        """Layer → what predicts it `depth` layers early."""
        return {layer: gate for (layer, of), gate in self.gates.items() if of == depth}


def write_gates(path: Path, gates: Gates) -> None:
    """Writes a file for `--route-ahead-gates`, whole or not at all.

    Raises:
        SettingsError: it cannot be written.
    """
    tensors: Tensors = {
        gate.name: gate.matrix for gate in gates.gates.values() if gate.matrix is not None
    }
    rows = [
        {name: value for name, value in vars(gate).items() if name != "matrix"}
        for gate in gates.gates.values()
    ]
    facts = {
        "format": _FORMAT,
        "model": gates.model,
        "gates": rows,
        "fitted": gates.fitted,
        "held": gates.held,
    }
    write_tensors(path, tensors, facts)


def read_gates(path: Path, model: str) -> Gates:
    """What `write_gates` wrote for the model with that fingerprint.

    Raises:
        SettingsError: the file cannot be read, is damaged, or is another model's.
    """
    tensors, facts = read_tensors(path)
    if facts.get("format") != _FORMAT:
        raise SettingsError(f"{path}: no calibrated routers; `routeahead calibrate` writes them")
    if facts["model"] != model:
        raise SettingsError(
            f"{path}: was calibrated for another model or quantisation: run `routeahead "
            "calibrate` with this one"
        )
    made = (_gate(row, tensors) for row in facts["gates"])
    return Gates.of(model, made, fitted=facts["fitted"], held=facts["held"])


def check_depth(gates: Gates, depth: float, path: Path) -> dict[int, Gate]:
    """What the gates have for `depth`.

    Raises:
        SettingsError: nothing.
    """
    found = gates.at(depth)
    if not found:
        there = ", ".join(map(str, gates.depths))
        raise SettingsError(
            f"{path}: calibrated for depth {there}, not {depth}: give another route_ahead, or "
            f"calibrate with --depth {depth}"
        )
    return found


def _gate(row: dict[str, Any], tensors: Tensors) -> Gate:
    gate = Gate(matrix=None, **row)
    matrix = tensors.get(gate.name)
    if matrix is None:
        return gate
    return Gate(matrix=np.ascontiguousarray(matrix, np.float32), **row)
