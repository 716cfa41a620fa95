"""A routing trace: which experts each token routed to, layer by layer, as a run recorded it.

Two formats with the same columns, one row a routed slot. As CSV, header lines
`# layer=L expert_bytes=B` come first. As Parquet (a name that ends in `.parquet`), the schema's
metadata has under the key `routeahead` the JSON `{"layers": {"L": B, ...}}`. Columns: `phase`
(0 = prefill, 1 = decode), `step` (position of the token), `layer`, `slot`, `expert`; others are
ignored. Rows are in the order in which the graph routed them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from routeahead.errors import RouteAheadError
from routeahead.telemetry.table import no_pyarrow, whole_lines

Phase = Literal["prefill", "decode"]
Rows = npt.NDArray[np.int64]

PHASES: tuple[Phase, Phase] = ("prefill", "decode")  # by the number in the file
COLUMNS = ("phase", "step", "layer", "slot", "expert")

_LAYER_FACT = re.compile(r"^#\s*layer=(\d+)\s+expert_bytes=(\d+)\b")


class TraceError(RouteAheadError, ValueError):
    """The trace cannot be used: missing, malformed, or nothing in it to replay."""


class Batch(NamedTuple):
    """What one layer looks up at one moment.

    Attributes:
        step: position of the (first) token.
        experts: distinct, in order of first appearance. In decode a token's top-k in slot order;
            in prefill the union over the rows of a ubatch, row by row.
    """

    phase: Phase
    step: int
    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True)
class RouteTrace:
    """A recorded run.

    Attributes:
        expert_bytes: bytes of one expert (all its projections), by layer.
        batches: in the order of the run.
        rows: int64 (slots, 5), the columns of COLUMNS as recorded.
    """

    expert_bytes: dict[int, int]
    batches: list[Batch]
    rows: Rows = field(
        default_factory=lambda: np.empty((0, len(COLUMNS)), np.int64), compare=False, repr=False
    )

    def selections(self) -> dict[tuple[int, int], npt.NDArray[np.int32]]:
        """(step, layer) → int32 (top-k,), the experts of that token in slot order."""
        step, layer = self.rows[:, 1], self.rows[:, 2]
        begins = np.flatnonzero((np.diff(step) != 0) | (np.diff(layer) != 0)) + 1
        pieces = np.split(self.rows, begins)
        return {(int(p[0, 1]), int(p[0, 2])): p[:, 4].astype(np.int32) for p in pieces}

    def first_layers(self, count: int) -> RouteTrace:
        """The same run of a model that ends after its first `count` MoE layers.

        A model's last layer routes a prompt's last token only: the others' output is not wanted.
        """
        kept = sorted(self.expert_bytes)[:count]
        phase, step, layer = self.rows[:, :3].T
        prompt = step[phase == PHASES.index("prefill")]
        inner = np.isin(step, prompt) & np.isin(step + 1, prompt) & (phase == 0)
        rows = self.rows[np.isin(layer, kept) & ~(inner & (layer == kept[-1]))]
        facts = {layer: self.expert_bytes[layer] for layer in kept}
        return RouteTrace(facts, _batches(rows, facts), rows)

    def counting(self, warmup: int, tokens: int | None = None) -> RouteTrace:
        """The same run, of which `tokens` decoded tokens (None: all) after the first `warmup`
        count: those before them are a part of the prompt, which only fills a cache, and those
        after them are left out.

        Raises:
            TraceError: no token is left to count.
        """
        decoded = self.decoded_tokens()
        counted = decoded[warmup:][:tokens]
        if not counted:
            raise TraceError(f"{len(decoded)} decoded tokens: none is left after {warmup}")
        first, last = counted[0][0], counted[-1][-1]
        before = [batch._replace(phase="prefill") for batch in self.batches[:first]]
        return RouteTrace(self.expert_bytes, [*before, *self.batches[first : last + 1]], self.rows)

    def decoded_tokens(self) -> list[list[int]]:
        """For each decoded token, the indices of its batches.

        A token passes through its layers in order, so one begins wherever the layer does not rise.
        """
        tokens: list[list[int]] = []
        layer_before: int | None = None
        for index, batch in enumerate(self.batches):
            if batch.phase == "prefill":
                layer_before = None
                continue
            if layer_before is None or batch.layer <= layer_before:
                tokens.append([])
            tokens[-1].append(index)
            layer_before = batch.layer
        return tokens


def read_trace(path: str | os.PathLike[str]) -> RouteTrace:
    """Reads a CSV or Parquet trace; a CSV that ends inside a row up to there, with a warning.

    Raises:
        TraceError: the file is missing or malformed.
    """
    path = Path(path)
    try:
        facts, rows = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
        return RouteTrace(facts, _batches(rows, facts), rows)
    except ImportError:
        raise TraceError(no_pyarrow(path)) from None
    except OSError as error:
        raise TraceError(f"{path}: {_one_line(error.strerror or error)}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except ValueError as error:  # from a library: bytes, a line or a number that it cannot read
        raise TraceError(f"{path}: not a routing trace: {_one_line(error)}") from error


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())


def _read_csv(path: Path) -> tuple[dict[int, int], Rows]:
    facts: dict[int, int] = {}
    with path.open(encoding="utf-8") as file:
        lines = whole_lines(file, path)
        line = next(lines, "")
        while line.startswith("#"):
            if match := _LAYER_FACT.match(line):
                facts[int(match[1])] = int(match[2])
            line = next(lines, "")
        names = line.strip().split(",")
        _require_columns(names)
        with warnings.catch_warnings():  # about a file without rows, which is an error further on
            warnings.filterwarnings("ignore", "loadtxt")
            rows = np.loadtxt(
                lines,
                dtype=np.int64,
                delimiter=",",
                usecols=[names.index(column) for column in COLUMNS],
                ndmin=2,
            )
    return facts, rows.reshape(-1, len(COLUMNS))


def _read_parquet(path: Path) -> tuple[dict[int, int], Rows]:
    import pyarrow as pa
    from pyarrow import parquet

    schema = parquet.read_schema(path)
    _require_columns(schema.names)
    table = parquet.read_table(path, columns=list(COLUMNS))
    integers = pa.schema([pa.field(column, pa.int64(), nullable=False) for column in COLUMNS])
    columns = table.select(list(COLUMNS)).cast(integers).columns
    rows = np.stack([column.to_numpy() for column in columns], axis=1)
    try:
        layers = json.loads(schema.metadata[b"routeahead"])["layers"]
        return {int(layer): int(size) for layer, size in layers.items()}, rows
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise TraceError("its schema metadata has no JSON 'routeahead' with 'layers'") from error


def _require_columns(names: Iterable[str]) -> None:
    present = set(names)
    missing = [column for column in COLUMNS if column not in present]
    if missing:
        raise TraceError(f"not a routing trace: it lacks the columns {', '.join(missing)}")


def _batches(rows: Rows, facts: dict[int, int]) -> list[Batch]:
    """Cuts `rows` [n, len(COLUMNS)] into batches.

    The ubatches of a prefill are told apart by the layer that changes between them, so the
    ubatches of a model with a single MoE layer come out as one.
    """
    _check(rows, facts)
    phase, step, layer, slot, expert = rows.T
    new_layer = (np.diff(phase) != 0) | (np.diff(layer) != 0)
    new_token = new_layer | (np.diff(step) != 0)
    unordered = ~new_token & (np.diff(slot) <= 0)
    if unordered.any():
        at = int(np.argmax(unordered)) + 1
        raise TraceError(f"row {at + 1}: slot {slot[at]} follows slot {slot[at - 1]} of its token")
    begins = new_layer | (new_token & (phase[1:] == PHASES.index("decode")))
    starts = [0, *(np.flatnonzero(begins) + 1).tolist()]
    ends = [*starts[1:], len(rows)]
    ids = expert.tolist()
    return [
        Batch(PHASES[phase[start]], int(step[start]), int(layer[start]), _distinct(ids[start:end]))
        for start, end in zip(starts, ends, strict=True)
    ]


def _distinct(experts: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(experts))


def _check(rows: Rows, facts: dict[int, int]) -> None:
    if not len(rows):
        raise TraceError("no routed slot in it")
    phase, _, layer, _, expert = rows.T
    unknown = sorted(
        set(np.unique(layer).tolist()) - {at for at, size in facts.items() if size > 0}
    )
    if unknown:
        raise TraceError(
            f"its header does not say how many bytes an expert of layer {unknown[0]} has"
        )
    for name, wrong in (("phase", (phase != 0) & (phase != 1)), ("expert", expert < 0)):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise TraceError(f"row {at + 1}: {name} {rows[at, COLUMNS.index(name)]} makes no sense")
