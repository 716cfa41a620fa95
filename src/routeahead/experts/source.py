"""The expert source: hands a layer the experts it routes to, from memory or from disk.

It joins the cache (which experts), the arena (where their bytes go) and the lanes (who reads
them). It knows layers, experts and projections; it does not know what a router is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from routeahead.errors import ReadError
from routeahead.experts.arena import Arena
from routeahead.experts.cache import ExpertCache
from routeahead.experts.lanes import Lanes, Read, Ticket
from routeahead.experts.layout import ExpertTensor, ModelLayout, TensorInfo
from routeahead.experts.reader import Reader

_DENSE_PIECE = 8 << 20  # bytes a read of dense weights


@dataclass
class Load:
    """A layer's reads in flight: one ticket a projection.

    Attributes:
        tickets: projection → its reads; a projection that is absent has nothing to wait for.
    """

    layer: int
    tickets: dict[str, Ticket] = field(default_factory=dict)

    def done(self) -> bool:
        return all(ticket.done for ticket in self.tickets.values())


class ExpertSource:
    """Provides experts, within a budget of bytes.

    Everything here belongs to the evaluation thread; lanes see only the `Read`s.

    Attributes:
        stall_s: seconds the evaluation thread waited for bytes.
    """

    def __init__(
        self,
        layout: ModelLayout,
        arena: Arena,
        reader: Reader,
        *,
        lanes: int,
    ) -> None:
        self._tensors = layout.experts
        self._by_layer: dict[int, list[ExpertTensor]] = {}
        for tensor in self._tensors:
            self._by_layer.setdefault(tensor.layer, []).append(tensor)
        self._arena = arena
        self._layer_bytes = layout.layer_bytes()
        self.cache = ExpertCache(0, layout.bytes_by_layer())
        self.lanes = Lanes(lanes, reader, arena)
        self._load: Load | None = None
        self.stall_s = 0.0

    def order_projections(self, order: Sequence[str]) -> None:
        """Reads are issued in the order in which the graph computes the projections."""
        for tensors in self._by_layer.values():
            tensors.sort(key=lambda t: order.index(t.projection) if t.projection in order else 99)

    def require(self, layer: int, experts: Sequence[int]) -> Load | None:
        """Starts reading those of the distinct `experts` that are not resident.

        Returns what to wait for before computing with them, or None where all are resident.
        """
        # Nothing is in flight here, so every page is either an entry's or free.
        self._arena.trim(max(0, self.cache.budget + self._layer_bytes - self.cache.used))
        outcome = self.cache.lookup(layer, experts)
        if outcome.victims:
            self._arena.give(
                [
                    self._arena.inner(tensor.shard, *tensor.slice_of(expert))
                    for victim_layer, expert in outcome.victims
                    for tensor in self._by_layer[victim_layer]
                ]
            )
        if not outcome.misses:
            self._load = None
            return None
        load = Load(layer)
        self._load = load  # before submitting, so that `recover` finds it whatever happens here
        reads: list[Read] = []
        for tensor in self._by_layer[layer]:
            ticket = load.tickets[tensor.projection] = Ticket(len(outcome.misses))
            reads += [self._read(tensor, expert, ticket) for expert in outcome.misses]
        self.lanes.submit(reads)
        return load

    def _read(self, tensor: ExpertTensor, expert: int, ticket: Ticket) -> Read:
        start, end = tensor.slice_of(expert)
        offset, view = self._arena.blocks(tensor.shard, start, end)
        return Read(
            shard=tensor.shard,
            offset=offset,
            view=view,
            need=end - offset,
            inner=self._arena.inner(tensor.shard, start, end),
            tensor=tensor,
            expert=expert,
            ticket=ticket,
        )

    def wait(self, load: Load, projection: str | None = None) -> None:
        """Blocks until the bytes of `projection` (None: of all) have arrived.

        Raises:
            ReadError: a read failed; the layer must not be computed.
        """
        tickets = load.tickets
        chosen = list(tickets.values()) if projection is None else [tickets[projection]]
        start = time.perf_counter()
        try:
            for ticket in chosen:
                ticket.wait()
        finally:
            self.stall_s += time.perf_counter() - start

    def expose(self) -> None:
        """The result is void: let whatever the graph still runs read anything."""
        self._arena.unpoison()

    def recover(self) -> None:
        """After a fault: waits for the lanes, forgets every expert, and starts empty.

        A fault may have struck anywhere, between two lines of bookkeeping too, so nothing of the
        old state is trusted.
        """
        self.lanes.cancel()
        for ticket in self._load.tickets.values() if self._load else ():
            with contextlib.suppress(ReadError):  # what brought us here, or a cancelled read
                ticket.wait()
        self._load = None
        self.cache.clear()
        self._arena.reset(self._tensors)

    def close(self) -> None:
        self.lanes.cancel()
        self.lanes.close()


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
        (shard, at, min(at + _DENSE_PIECE, end))
        for shard, start, end in dense_runs(tensors)
        for at in range(start, end, _DENSE_PIECE)
    ]
    total, done = sum(end - start for _, start, end in pieces), 0

    def read(piece: tuple[int, int, int]) -> int:
        shard, start, end = piece
        offset, _ = arena.blocks(shard, start, end)
        reader.read(shard, offset, arena.expose(shard, start, end), end - offset)
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
