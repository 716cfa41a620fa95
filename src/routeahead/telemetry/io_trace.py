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
from routeahead.experts.reads import ReadRecord
from routeahead.telemetry.table import open_table, read_table
from routeahead.types import Phase

COLUMNS: Mapping[str, str] = {
    "time_s": "float64",  # when the read ended, from the start of the trace
    "step": "int64",  # rows evaluated before, without guesses that were wrong
    "phase": "string",
    "lane": "int64",
    "kind": "string",  # demand, committed, ahead, speculative, idle
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

    `list.append` is atomic. What a batch needed has been read when it ends. A guess that is still
    being read then is written with the next batch, as the counters count it.
    """

    def __init__(self, path: Path, start: float) -> None:
        """Begins the file; `start` is the time, by `time.perf_counter`, that is its zero.

        Raises:
            SettingsError: the file cannot be written.
        """
        self._table = open_table(path, COLUMNS, {"format": "io_trace v2"})
        self._start, self._step = start, 0
        self.records: list[ReadRecord] = []

    def end_of_batch(self, phase: Phase, tokens: int) -> None:
        """Writes what was read for a batch of `tokens` rows, those of guesses not among them."""
        count = len(self.records)  # a lane may append while this runs
        records = self.records[:count]
        del self.records[:count]
        if records:
            count = len(records)
            begin, end, lane, kind, layer, expert, projection, shard, offset, nbytes = zip(
                *records, strict=True
            )
            ended = [round(at - self._start, 7) for at in end]
            took = [round(b - a, 7) for a, b in zip(begin, end, strict=True)]
            steps, phases = [self._step] * count, [phase] * count
            self._table.add(
                [ended, steps, phases, lane, kind, layer, expert, projection, shard, offset, nbytes,
                 took]
            )  # fmt: skip
        self._step += tokens

    def accepted(self) -> None:
        """A guess of the last batch was right."""
        self._step += 1

    def close(self) -> None:
        self._table.close()


@dataclass(frozen=True)
class IoReport:
    """What a trace of reads shows. Bytes are physical.

    Attributes:
        reads, bytes_read: all phases.
        decode_tokens: decoded tokens from the first that read anything to the last batch that did,
            which counts as one.
        decode_bytes: bytes of the decode phase.
        redundancy: share of decode bytes that had been read before (evicted and read again).
        early_again: slices read early (committed or speculative) and on demand in the same token.
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
        return read_table(path, COLUMNS).columns
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not an I/O trace"
        raise ModelError(f"{path}: {reason}; write one with `run --io-trace FILE`") from None


def report(columns: Mapping[str, npt.NDArray[Any]], *, tokens: int | None = None) -> IoReport:
    """Figures of a trace, or of its first `tokens` decoded tokens.

    Only runs of equal length can be compared: a cache fills, so later tokens read less.
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


_EARLY = ("committed", "speculative")


def _early_again(
    slices: Sequence[Any], steps: npt.NDArray[np.int64], kinds: npt.NDArray[np.str_]
) -> int:
    reads = list(zip(steps.tolist(), slices, kinds.tolist(), strict=True))
    early = {(step, key) for step, key, kind in reads if kind in _EARLY}
    return sum(kind == "demand" and (step, key) in early for step, key, kind in reads)
