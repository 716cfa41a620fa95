"""Reads the weights that every token uses into the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from routeahead.errors import no_thread
from routeahead.experts.arena import Arena
from routeahead.experts.layout import BLOCK, TensorInfo
from routeahead.experts.reader import Reader, read_whole

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
        SettingsError: the system refused to start a thread.
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
        read_whole(reader, shard, offset, view, end - offset)
        return end - start

    with ThreadPoolExecutor(threads, thread_name_prefix="dense") as pool:
        try:
            results = pool.map(read, pieces)  # starts the threads
        except RuntimeError:
            raise no_thread("reading the dense weights") from None
        for nbytes in results:
            done += nbytes
            if progress:
                progress(done, total)


def dense_runs(tensors: Sequence[TensorInfo]) -> list[tuple[int, int, int]]:
    """Ranges of tensors that lie next to each other: (shard, start, end) in bytes."""
    runs: list[tuple[int, int, int]] = []
    for tensor in sorted(tensors, key=lambda t: (t.shard, t.offset)):
        end = tensor.offset + tensor.nbytes
        if runs and runs[-1][0] == tensor.shard and tensor.offset - runs[-1][2] < BLOCK:
            runs[-1] = (tensor.shard, runs[-1][1], end)
        else:
            runs.append((tensor.shard, tensor.offset, end))
    return runs
