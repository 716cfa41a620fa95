"""Reads the weights that every token uses into the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from routeahead.experts.arena import Arena
from routeahead.experts.layout import TensorInfo
from routeahead.experts.reader import Reader

_PIECE = 8 << 20  # bytes a read


def read_dense(
    tensors: Sequence[TensorInfo],
    arena: Arena,
    reader: Reader,
    *,
    threads: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Reads the dense weights into the arena.

    Args:
        progress: called with (bytes done, bytes in all).

    Raises:
        ReadError: a read failed.
    """
    pieces = [
        (shard, at, min(at + _PIECE, end))
        for shard, start, end in dense_runs(tensors)
        for at in range(start, end, _PIECE)
    ]
    total, done = sum(end - start for _, start, end in pieces), 0

    def read(piece: tuple[int, int, int]) -> int:
        shard, start, end = piece
        offset, view = arena.expose(shard, start, end)
        reader.read(shard, offset, view, end - offset)
        return end - start

    with ThreadPoolExecutor(threads, thread_name_prefix="dense") as pool:
        for nbytes in pool.map(read, pieces):
            done += nbytes
            if progress:
                progress(done, total)


def dense_runs(tensors: Sequence[TensorInfo]) -> list[tuple[int, int, int]]:
    """Joins tensors that lie next to each other: (shard, start, end) in bytes."""
    runs: list[tuple[int, int, int]] = []
    for tensor in sorted(tensors, key=lambda t: (t.shard, t.offset)):
        end = tensor.offset + tensor.nbytes
        if runs and runs[-1][0] == tensor.shard and tensor.offset - runs[-1][2] < 4096:
            runs[-1] = (tensor.shard, runs[-1][1], end)
        else:
            runs.append((tensor.shard, tensor.offset, end))
    return runs
