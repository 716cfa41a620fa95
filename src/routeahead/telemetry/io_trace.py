"""`--io-trace`: every physical read of a run, and what `io-report` finds in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routeahead.errors import ModelError
from routeahead.experts.lanes import ReadRecord
from routeahead.telemetry.counters import Phase
from routeahead.telemetry.table import no_pyarrow, open_table, whole_lines

COLUMNS: Mapping[str, str] = {
    "time_s": "float64",  # when the read ended, from the start of the trace
    "step": "int64",  # batches evaluated before
    "phase": "string",
    "lane": "int64",
    "kind": "string",  # demand, committed, speculative
    "layer": "int64",
    "expert": "int64",
    "projection": "string",
    "shard": "int64",
    "offset": "int64",
    "bytes": "int64",
    "latency_s": "float64",
}


class IoTrace:
    """Lanes append to `records`; the evaluation thread writes them after each batch.

    `list.append` is atomic. What a batch needed has been read when it ends; a guess that is still
    being read then, by a prefetcher, is written with the next batch, as the counters have it.
    """

    def __init__(self, path: Path, start: float) -> None:
        """
        Raises:
            SettingsError: the file cannot be written.
        """
        self._table = open_table(path, COLUMNS, ["io_trace v1"], {})
        self._start, self._step = start, 0
        self.records: list[ReadRecord] = []

    def end_of_batch(self, phase: Phase, tokens: int) -> None:
        count = len(self.records)  # a lane may append while this runs
        records = self.records[:count]
        del self.records[:count]
        self._table.add(
            [
                [
                    round(r.end - self._start, 7), self._step, phase, r.lane, r.kind, r.layer,
                    r.expert, r.projection, r.shard, r.offset, r.nbytes, round(r.end - r.begin, 7),
                ]
                for r in records
            ]
        )  # fmt: skip
        self._step += tokens

    def close(self) -> None:
        self._table.close()


@dataclass(frozen=True)
class IoReport:
    """What a trace of reads shows. Bytes are physical.

    Attributes:
        reads, bytes_read: all phases.
        decode_tokens: decoded tokens that read anything or lie between such tokens.
        decode_bytes: bytes of the decode phase.
        redundancy: share of decode bytes that had been read before (evicted and read again).
        early_again: slices read early (committed or speculative) and again on demand in one token.
        kinds: reads by kind.
        latency_s: median seconds of a read.
    """

    reads: int
    bytes_read: int
    decode_tokens: int
    decode_bytes: int
    redundancy: float
    early_again: int
    kinds: dict[str, int]
    latency_s: float

    @property
    def bytes_per_token(self) -> float:
        return self.decode_bytes / self.decode_tokens if self.decode_tokens else 0.0


def read_io_trace(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The columns of an I/O trace.

    Raises:
        ModelError: the file is no I/O trace.
    """
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            table = parquet.read_table(path)
            columns = {n: table.column(n).to_numpy(zero_copy_only=False) for n in COLUMNS}
        else:
            columns = _read_csv(path)
    except ImportError:
        raise ModelError(no_pyarrow(path)) from None
    except (OSError, ValueError, KeyError, IndexError) as error:
        reason = getattr(error, "strerror", None) or "not an I/O trace"
        raise ModelError(f"{path}: {reason}; write one with `run --io-trace FILE`") from None
    return columns


def _read_csv(path: Path) -> dict[str, npt.NDArray[Any]]:
    with path.open(encoding="utf-8") as file:
        rows = (line for line in whole_lines(file, path) if not line.startswith("#"))
        lines = [line.rstrip("\n").split(",") for line in rows]
    if lines[0] != list(COLUMNS):
        raise ValueError
    kinds = {"int64": np.int64, "float64": np.float64, "string": np.str_}
    cells = list(zip(*lines[1:], strict=True)) or [()] * len(COLUMNS)
    return {
        name: np.array(cells[index], dtype=np.str_).astype(kinds[kind])
        for index, (name, kind) in enumerate(COLUMNS.items())
    }


def report(columns: Mapping[str, npt.NDArray[Any]], *, tokens: int | None = None) -> IoReport:
    """Figures of a trace; with `tokens`, of its first that many decoded tokens only.

    Runs can be compared only over equal lengths: a cache fills up, so later tokens read less.
    """
    decode = columns["phase"] == "decode"
    if tokens is not None and decode.any():
        first = columns["step"][decode].min()
        keep = ~decode | (columns["step"] < first + tokens)
        columns = {name: values[keep] for name, values in columns.items()}
        decode = columns["phase"] == "decode"
    sizes, steps = columns["bytes"], columns["step"]
    span = int(steps[decode].max() - steps[decode].min()) + 1 if decode.any() else 0
    slices = list(
        zip(columns["layer"].tolist(), columns["expert"].tolist(), columns["projection"].tolist(),
            strict=True)
    )  # fmt: skip
    return IoReport(
        reads=len(sizes),
        bytes_read=int(sizes.sum()),
        decode_tokens=tokens if tokens is not None else span,
        decode_bytes=int(sizes[decode].sum()),
        redundancy=_redundancy(slices, sizes, decode),
        early_again=_early_again(slices, steps, columns["kind"]),
        kinds=dict(Counter(columns["kind"].tolist())),
        latency_s=float(np.median(columns["latency_s"])) if len(sizes) else 0.0,
    )


def _redundancy(
    slices: Sequence[Any], sizes: npt.NDArray[np.int64], decode: npt.NDArray[np.bool_]
) -> float:
    seen: set[Any] = set()
    again = 0
    for key, nbytes, counted in zip(slices, sizes.tolist(), decode.tolist(), strict=True):
        again += nbytes if counted and key in seen else 0
        seen.add(key)
    total = int(sizes[decode].sum())
    return again / total if total else 0.0


def _early_again(
    slices: Sequence[Any], steps: npt.NDArray[np.int64], kinds: npt.NDArray[np.str_]
) -> int:
    reads = list(zip(steps.tolist(), slices, kinds.tolist(), strict=True))
    early = {(step, key) for step, key, kind in reads if kind != "demand"}
    return sum(kind == "demand" and (step, key) in early for step, key, kind in reads)
