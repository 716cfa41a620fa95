"""An evaluation's settings as jobs for the nodes of a cluster.

A job is one setting and all of its pieces, in order, by one process: what a setting's cache holds
decides which bytes it reads, and under some policies its output, so that pieces done elsewhere
would give other figures. Only a resident model's pieces are independent, and are spread as well.
The baseline's logits stay in the memory of the nodes, from where the settings' jobs take them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from routeahead.cluster import fetched
from routeahead.engine.llama import Llama
from routeahead.errors import RouteAheadError, SettingsError
from routeahead.evaluation import grading
from routeahead.evaluation.corpus import Chunk, Piece
from routeahead.evaluation.quality import Logits
from routeahead.llamacpp.gguf_file import read_layout

Files = Sequence[tuple[str, int]]
"""Names and sizes of a model's files."""


@dataclass(frozen=True)
class Job:
    """Pieces of one setting. Of the baseline, it gives the logits of its chunks.

    Attributes:
        load: loads the model as the setting says; `model` is its path.
        files: what the model's files have to be.
    """

    name: str
    load: Callable[[], Llama]
    model: Any
    files: Files
    pieces: Sequence[Piece]
    through_decode: bool
    is_baseline: bool


def files_of(model: Any) -> Files:
    return [(shard.path.name, shard.size) for shard in read_layout(model).shards]


def cut(pieces: Sequence[Piece], count: int) -> list[Sequence[Piece]]:
    """At most `count` runs of consecutive pieces with about as much work each."""
    total, done = sum(piece.work for piece in pieces), 0
    parts: list[list[Piece]] = [[] for _ in range(count)]
    for piece in pieces:
        parts[min(count - 1, done * count // max(total, 1))].append(piece)
        done += piece.work
    return [part for part in parts if part]


def do(job: Job, logits: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Logits]]:
    """On a node: the results by piece, and of the baseline its logits by chunk.

    `logits` are references to what jobs of the baseline gave.
    """
    if files_of(job.model) != list(job.files):
        raise SettingsError(f"{job.model}: is another model on a node than here")
    baseline = {name: rows for part in fetched(logits) for name, rows in part.items()}
    results: dict[str, Any] = {}
    kept: dict[str, Logits] = {}
    try:
        with contextlib.closing(job.load()) as llm:
            for piece in job.pieces:
                results[piece.name] = _done(llm, job, piece, baseline, kept)
    except RouteAheadError as error:
        raise type(error)(f"{job.name}: {error}") from None
    return results, kept


def _done(
    llm: Llama, job: Job, piece: Piece, baseline: dict[str, Logits], kept: dict[str, Logits]
) -> dict[str, Any]:
    before, rows = copy(llm.counters.decode), list[Logits]()
    keeps = job.is_baseline and isinstance(piece, Chunk)
    result = grading.graded(
        llm,
        piece,
        job.through_decode,
        lambda _: None,
        keep=(lambda row: rows.append(row.copy())) if keeps else None,
        baseline=baseline.get(piece.name),
    )
    if keeps:
        kept[piece.name] = np.stack(rows)
    return result | {"decode": vars(llm.counters.decode.minus(before))}
