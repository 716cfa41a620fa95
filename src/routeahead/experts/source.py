"""The expert source: hands a layer the experts it routes to, from memory or from disk.

It joins the cache (which experts), the arena (where their bytes go) and the lanes (who reads
them). It knows layers, experts and projections; it does not know what a router is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from routeahead.errors import no_thread
from routeahead.experts.arena import Arena
from routeahead.experts.cache import ExpertCache
from routeahead.experts.guesses import Guess, Guesses
from routeahead.experts.lanes import Kind, Lanes, Read, Slice, Ticket
from routeahead.experts.layout import ExpertTensor, ModelLayout, TensorInfo
from routeahead.experts.reader import Reader, read_whole

_DENSE_PIECE = 8 << 20  # bytes a read of dense weights


@dataclass
class Load:
    """A layer's reads in flight: one ticket a projection.

    Attributes:
        experts: what is being read.
        tickets: projection → its reads; a projection that is absent has nothing to wait for.
        adopted: reads of the layer that were begun before it asked.
    """

    layer: int
    experts: Sequence[int]
    tickets: dict[str, Ticket] = field(default_factory=dict)
    adopted: list[Load] = field(default_factory=list)

    def done(self) -> bool:
        return all(ticket.done for ticket in self.tickets.values()) and all(
            load.done() for load in self.adopted
        )

    def failed(self) -> bool:
        return any(ticket.error for ticket in self.tickets.values())

    def wait(self, projection: str | None) -> None:
        """Blocks until the reads of `projection` (None: of all) have settled.

        Raises:
            ReadError: one of them failed.
        """
        for name, ticket in self.tickets.items():
            if projection in (None, name):
                ticket.wait()


@dataclass
class Prefetch:
    """Counts of experts that were read before their layer asked; one is all of its projections.

    Attributes:
        issued: queued early, because they were absent.
        completed: read, or being read, when their layer asked; the others were taken back before
            a lane had begun them (guesses), or discarded after a fault.
        useful: used by that layer.
    """

    issued: int = 0
    completed: int = 0
    useful: int = 0


class _Slices(dict[int, Slice]):
    """One projection's slices by expert, each computed when it is first asked for."""

    def __init__(self, tensor: ExpertTensor, arena: Arena) -> None:
        super().__init__()
        self.tensor, self._arena = tensor, arena

    def __missing__(self, expert: int) -> Slice:
        tensor, arena = self.tensor, self._arena
        start, end = tensor.slice_of(expert)
        offset, view = arena.blocks(tensor.shard, start, end)
        inner = arena.inner(tensor.shard, start, end)
        found = self[expert] = Slice(tensor, expert, offset, view, end - offset, inner)
        return found


class ExpertSource:
    """Provides experts, within a budget of bytes.

    Everything here belongs to the evaluation thread; lanes see only the `Read`s.

    Attributes:
        stall_s: seconds the evaluation thread waited for bytes.
        adopt_s: the part of it that was spent on reads begun early.
        prefetch: counts of those reads.
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
        self._by_layer: dict[int, list[_Slices]] = {}
        for tensor in self._tensors:
            self._by_layer.setdefault(tensor.layer, []).append(_Slices(tensor, arena))
        self._arena = arena
        self._layer_bytes = layout.layer_bytes()
        self.cache = ExpertCache(0, layout.bytes_by_layer())
        self.lanes = Lanes(lanes, reader, arena)
        self._order: dict[str, int] = {}
        self._early: dict[int, Load] = {}  # by layer, from `read_early` until the layer asks
        self._guesses = Guesses()
        self._void = False  # a fault's traces have not been removed yet
        self.prefetch = Prefetch()
        self.stall_s = self.adopt_s = 0.0

    def begin(self) -> None:
        """Prepares for a batch: completes a `recover` that a second Ctrl-C interrupted."""
        if self._void:
            self.recover()

    def resize(self, budget: int) -> None:
        """Changes the cache's budget between two batches; what no longer fits is given back."""
        self.cache.budget = budget
        self._give(self.cache.shrink())
        self._arena.trim(max(0, budget + self._layer_bytes - self.cache.used))

    def order_projections(self, order: Sequence[str]) -> None:
        """Reads are issued in the order in which the graph computes the projections."""
        self._order = {projection: place for place, projection in enumerate(order)}
        for projections in self._by_layer.values():
            projections.sort(key=lambda p: self._order.get(p.tensor.projection, 99))

    def require(self, layer: int, experts: Sequence[int]) -> Load | None:
        """Starts reading those of the distinct `experts` that are not resident.

        Returns what to wait for before computing with them; None if all are resident.
        """
        # Nothing that an earlier layer needed is in flight here, so every page is an entry's (early
        # ones may still be on their way: they count as used), a guess's, or free.
        self._arena.trim(max(0, self.cache.budget + self._layer_bytes - self.cache.used))
        outcome = self.cache.lookup(layer, experts)
        if outcome.victims:
            self._give(outcome.victims)
        early = self._early.pop(layer, None) if self._early else None
        if early:
            return self._adopt(early, experts, outcome.misses)
        if self._guesses:
            return self._redeem(layer, outcome.misses)
        if not outcome.misses:
            return None
        load, reads = self._prepare(layer, outcome.misses)
        self.lanes.submit(reads)
        return load

    def resident(self, layer: int, expert: int) -> bool:
        """Whether using the expert causes no read.

        It is in the cache (what a committed read is bringing is), or a guess of it has arrived.
        """
        guess = self._guesses.get(layer, expert) if self._guesses else None
        return (layer, expert) in self.cache or (guess is not None and guess.landed)

    def read_early(self, layer: int, experts: Sequence[int]) -> None:
        """Reads what a later `layer` will certainly use, and keeps all of it until then.

        Only experts that are not resident are read. Without a cache nothing can be kept, so nothing
        is read.
        """
        if not self.cache.budget:
            return
        misses = self.cache.admit_early(layer, experts)
        if misses:
            self._early[layer], reads = self._prepare(layer, misses, "committed")
            self.prefetch.issued += len(misses)
            self.lanes.submit(reads, "committed")

    def guess(self, layer: int, experts: Sequence[int], limit: int | None = None) -> None:
        """Reads what a later `layer` may use, until some layer asks for its experts.

        Args:
            experts: likeliest first.
            limit: absent experts to read at most; None for all.
        """
        absent = [e for e in experts if (layer, e) not in self.cache][:limit]
        reads: list[Read] = []
        for expert in absent:
            known = self._guesses.get(layer, expert)
            if known:  # it was taken back, or it was for the token before, and in flight
                self.prefetch.issued += not known.wanted
                known.wanted = True
                reads += known.take_revoked()
                continue
            made = [Read(p[expert], Ticket(1), "speculative") for p in self._by_layer[layer]]
            self._guesses.add(layer, expert, Guess(made))
            self.prefetch.issued += 1
            reads += made
        if reads:
            self.lanes.submit(reads, "speculative")

    def protect(self, layer: int, experts: Sequence[int]) -> None:
        """Keeps those `experts` of a later layer that are resident until it has used them."""
        self.cache.protect(layer, experts)

    def _redeem(self, layer: int, misses: Sequence[int]) -> Load | None:
        """Uses the guesses for a layer that now asks for its experts, and drops the wrong ones.

        All guesses that no lane has begun are taken back from the queue; those for later layers are
        guessed again once this layer has its own experts.
        """
        self._guesses.revoke(self.lanes.revoke())
        found = {e: guess for e in misses if (guess := self._guesses.pop(layer, e)) and guess.begun}
        self.prefetch.completed += len(found) + self._guesses.pass_by(layer)
        self.prefetch.useful += len(found)
        self._arena.give(self._guesses.sweep())
        missing = [guess for guess in found.values() if not guess.landed]
        absent = [expert for expert in misses if expert not in found]
        if not absent and not missing:
            return None
        load, reads = self._prepare(layer, absent)
        for guess in missing:
            tickets = {read.slice.tensor.projection: read.ticket for read in guess.reads}
            load.adopted.append(Load(layer, (), tickets))
            for read in guess.take_revoked():
                read.kind = "demand"  # it begins because the layer waits
                reads.append(read)
        self._submit_in_order(reads)
        return load

    def _adopt(self, early: Load, experts: Sequence[int], misses: Sequence[int]) -> Load | None:
        """Uses the committed reads of a layer that now asks for its experts.

        Those that no lane has begun go to the front of the queue, with what else the layer needs;
        those in flight are waited for.
        """
        self.prefetch.completed += len(early.experts)
        self.prefetch.useful += len(set(early.experts).intersection(experts))
        if early.done() and not misses and not early.failed():
            return None
        load, reads = self._prepare(early.layer, misses)
        load.adopted.append(early)
        self._submit_in_order(self.lanes.adopt(early.layer) + reads)
        return load

    def _submit_in_order(self, reads: list[Read]) -> None:
        """Queues reads that a layer waits for, in the order in which it uses their projections."""
        reads.sort(key=lambda read: self._order.get(read.slice.tensor.projection, 99))
        self.lanes.submit(reads)

    def _give(self, victims: Sequence[tuple[int, int]]) -> None:
        """Frees the pages of (layer, expert) keys. No read of theirs is in flight: what is being
        read is part of the batch or protected."""
        self._arena.give(
            [slices[expert].inner for layer, expert in victims for slices in self._by_layer[layer]]
        )

    def _prepare(
        self, layer: int, experts: Sequence[int], kind: Kind = "demand"
    ) -> tuple[Load, list[Read]]:
        load, reads = Load(layer, experts), list[Read]()
        if not experts:
            return load, reads
        for slices in self._by_layer[layer]:
            ticket = load.tickets[slices.tensor.projection] = Ticket(len(experts))
            reads += [Read(slices[expert], ticket, kind) for expert in experts]
        return load, reads

    def wait(self, load: Load, projection: str | None = None) -> None:
        """Blocks until the bytes of `projection` (None: of all) have arrived.

        Raises:
            ReadError: a read failed; the layer must not be computed.
        """
        start = time.perf_counter()
        try:
            if load.adopted:
                try:
                    for adopted in load.adopted:
                        adopted.wait(projection)
                finally:
                    self.adopt_s += time.perf_counter() - start
            load.wait(projection)
        finally:
            self.stall_s += time.perf_counter() - start

    def release(self) -> None:
        """Ends every protection after a step, in which every layer has had its experts."""
        if self._early:  # a layer never came for its reads, which may be in flight
            self.recover()
        self.cache.release()

    def expose(self) -> None:
        """Makes all pages accessible: a graph whose result is void may still run products."""
        self._arena.unpoison()

    def recover(self) -> None:
        """After a fault: waits for the lanes, forgets every expert, and starts empty.

        A fault may occur anywhere, also between two lines of bookkeeping, so nothing of the old
        state is used.
        """
        self._void = True
        self.lanes.drain()
        self._early.clear()
        self._guesses.clear()
        self.cache.clear()
        self._arena.reset(self._tensors)
        self._void = False

    def close(self) -> None:
        """Stops the lanes and lets go of all memory."""
        self.lanes.close()
        self._by_layer.clear()
        self._early.clear()
        self._guesses.clear()


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
        (shard, at, min(at + _DENSE_PIECE, end))
        for shard, start, end in dense_runs(tensors)
        for at in range(start, end, _DENSE_PIECE)
    ]
    total, done = sum(end - start for _, start, end in pieces), 0

    def read(piece: tuple[int, int, int]) -> int:
        shard, start, end = piece
        offset, _ = arena.blocks(shard, start, end)
        read_whole(reader, shard, offset, arena.expose(shard, start, end), end - offset)
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
        if runs and runs[-1][0] == tensor.shard and tensor.offset - runs[-1][2] < 4096:
            runs[-1] = (tensor.shard, runs[-1][1], end)
        else:
            runs.append((tensor.shard, tensor.offset, end))
    return runs
