"""The expert source: hands a layer the experts it routes to, from memory or from disk.

It joins the cache (which experts), the slots (where their bytes go) and the lanes (who reads
them). It knows layers, experts and projections; it does not know what a router is.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from routeahead.errors import ReadError
from routeahead.experts.cache import ExpertCache
from routeahead.experts.eviction import eviction
from routeahead.experts.filling import Filling
from routeahead.experts.guesses import Guess, Guesses
from routeahead.experts.lanes import Lanes
from routeahead.experts.layout import ModelLayout
from routeahead.experts.load import Load, Prefetch
from routeahead.experts.reader import Reader
from routeahead.experts.reads import Kind, Read
from routeahead.experts.slot_table import Bind, SlotTable
from routeahead.experts.slots import Slots
from routeahead.experts.uses import Uses
from routeahead.types import CachePolicy, Ids


class ExpertSource:
    """Provides experts, within a budget of bytes.

    Everything here belongs to who has the cache (`engine.ownership`): the evaluation thread, or
    between two batches a thread that borrows it. Lanes see only the `Read`s.

    Attributes:
        stall_s: seconds the evaluation thread waited for bytes.
        adopt_s: the part of it that was spent on reads begun early.
        prefetch: counts of those reads.
        ahead: counts of what was read ahead for the later layers of prompts.
        window: bytes that those may take beside the cache.
        table: where the experts are.
    """

    def __init__(
        self,
        layout: ModelLayout,
        slots: Slots,
        reader: Reader,
        *,
        lanes: int,
        bind: Bind,
        cache_policy: CachePolicy,
    ) -> None:
        self._layout, self._slots = layout, slots
        self.table = SlotTable(layout, slots, bind, most=self._most_slots)
        self._emptied = 0  # `cache.emptied` when the slots were laid out
        self._layer_bytes, self._token_bytes = layout.layer_bytes(), layout.token_bytes()
        make_eviction = eviction(cache_policy, layout.n_expert)
        self.cache = ExpertCache(0, layout.bytes_by_layer(), make_eviction)
        self.lanes = Lanes(lanes, reader, slots)
        self._early: dict[int, Load] = {}  # by layer, from `read_early` until the layer asks
        self._guesses = Guesses()
        self._void = False  # a fault's traces have not been removed yet
        self.prefetch, self.ahead = Prefetch(), Prefetch()
        self.window = 0
        self.stall_s = self.adopt_s = 0.0
        self.filling: Filling | None = None

    def fill(self, uses: Uses) -> None:
        """From now on, idle lanes read into the cache while it has room, the most used first."""
        self.filling = Filling(
            self.cache, self.lanes, uses, make_reads=self.table.reads, give=self.table.give
        )
        self.begin()

    def begin(self) -> None:
        """Prepares for a batch: completes a `recover` that a second Ctrl-C interrupted."""
        if self._void or self._stale:
            self.recover()
        if self.filling:
            self.filling.begin()

    @property
    def _stale(self) -> bool:
        """Whether the cache was emptied since, so that the slots hold what it does not know of. Not
        to be told by its budget, which may have been set to what it was."""
        return self._emptied != self.cache.emptied

    def resize(self, budget: int) -> None:
        """Changes the cache's budget between two batches; what no longer fits is given back."""
        if self._stale or not self.cache.budget or self.settled is not None:
            self.cache.budget = budget
            self.recover()  # lays the slots out anew, empty
            return
        if self.filling:
            self.filling.stop()
        victims = self.cache.resize(budget)
        if self.filling:
            self.filling.evicted(victims)
        self.table.give(victims)
        self.table.give_back()

    @property
    def held(self) -> int:
        """Bytes of memory that slots have, in use or free. May be called on any thread."""
        planned = unread = 0
        if self.filling:
            reads = sum(piece[0].n_expert for piece in self._layout.pieces)
            unread = self.lanes.idle_queued * self._layout.expert_bytes // reads
            planned = self.filling.planned
        if self.settled is not None:
            beside = (len(self._guesses) + planned) * self._layout.largest_expert()
            return self.cache.used + max(0, beside - unread)
        return max(self.cache.used, self.table.held - unread)

    @property
    def settled(self) -> npt.NDArray[np.bool_] | None:
        """(layers, n_expert), if all experts fit: which of them have been used with no read in
        flight, so that they are here for good. None if they do not all fit. With all of them here,
        each has the slot of its own number."""
        return self.table.settled

    @property
    def slot_range(self) -> tuple[int, int]:
        """First address of all slots and the one behind the last; nothing where slots have the
        numbers of their experts."""
        address, nbytes = self._slots.range
        return (0, 0) if self.settled is not None else (address, address + nbytes)

    def require(self, layer: int, experts: Sequence[int], rows: Ids | None = None) -> Load | None:
        """Starts reading those of the distinct `experts` that are not resident.

        Returns what to wait for before computing with them; None if all are resident.

        Args:
            rows: int32 (rows, top-k), the experts of each row of the batch; None if it has one row.
        """
        outcome = self.cache.lookup(layer, experts, rows)
        begun: dict[int, Guess] = {}
        if self.filling:
            self.filling.evicted(outcome.victims)
            begun = self.filling.asked(layer, experts, outcome.misses)
        if outcome.victims:
            self.table.give(outcome.victims)
        early = self._early.pop(layer, None) if self._early else None
        if self.settled is not None and not early:
            self.settled[layer, list(set(experts).difference(outcome.misses))] = True
        if early or self._guesses or begun:
            return self._take_over(layer, experts, outcome.misses, early, begun)
        if not outcome.misses:
            return None
        load, reads = self.table.load(layer, outcome.misses, "demand")
        self.lanes.submit(reads)
        return load

    def _take_over(
        self,
        layer: int,
        experts: Sequence[int],
        misses: list[int],
        early: Load | None,
        begun: dict[int, Guess],
    ) -> Load | None:
        """The layer has come to reads that were begun before it asked. Those that no lane has begun
        go to the front, with what else it needs; those in flight are waited for."""
        adopted: list[Load] = []
        reads: list[Read] = []
        if early:
            reads += self._adopt(early, experts, adopted)
        if self._guesses:
            begun |= self._redeem(layer, misses)
        reads += self._join(layer, begun, adopted, "demand")
        misses = [expert for expert in misses if expert not in begun]
        if not misses and not adopted:
            return None
        load, more = self.table.load(layer, misses, "demand")
        load.adopted = adopted
        self._submit_in_order(reads + more)
        return load

    def resident(self, layer: int, expert: int) -> bool:
        """Whether using the expert causes no read: it is in the cache, which has what a committed
        read is bringing, or a guess of it has landed. What is read ahead for a prompt does not
        count, or what a policy makes of a prompt would depend on how fast the disk is."""
        guess = self._guesses.get(layer, expert) if self._guesses else None
        landed = guess is not None and not guess.ahead and guess.landed
        return (layer, expert) in self.cache or landed

    def cached(self, layer: int, expert: int) -> bool:
        """Whether the cache has the expert by its books. What lookups and early reads there were
        says so, and their order: not how fast a read is, nor a guess."""
        return (layer, expert) in self.cache

    def read_early(self, layer: int, experts: Sequence[int]) -> None:
        """Reads what a later `layer` will certainly use, and keeps all of it until then.

        Only experts that are not resident are read. Without a cache nothing can be kept, so nothing
        is read.
        """
        if self._stale:
            self.recover()
        misses = self.cache.admit_early(layer, experts)
        if misses:
            if self._guesses:  # an expert has one slot: who reads into it must be one
                self._abandon(layer)
            begun = self.filling.asked(layer, (), misses) if self.filling else {}
            absent = [expert for expert in misses if expert not in begun] if begun else misses
            early, reads = self.table.load(layer, absent, "committed")
            early.reads = tuple(reads)
            if begun:
                reads += self._join(layer, begun, early.adopted, "committed")
            self.prefetch.issued += len(absent)
            if layer in self._early:  # the layer waits for what was begun for it before, too
                before = self._early[layer]
                early.adopted.append(before)
                early.experts, early.reads = [*before.experts, *absent], before.reads + early.reads
            self._early[layer] = early
            self.lanes.submit(reads, "committed")

    def guess(self, layer: int, experts: Sequence[int], limit: int | None = None) -> None:
        """Reads what a later `layer` may use, until some layer asks for its experts.

        Args:
            experts: likeliest first.
            limit: absent experts to read at most; None for all.
        """
        if self._stale:
            self.recover()
        absent = [e for e in experts if (layer, e) not in self.cache][:limit]
        self._guess(layer, absent, "speculative", self.prefetch)

    def read_ahead(self, layer: int, experts: Sequence[int]) -> bool:
        """Reads what a later `layer` of a prompt is expected to use, as far as `window` has room.

        It is beside the cache until its layer asks, as any guess is; `finish_ahead` ends it.

        Args:
            experts: likeliest first.

        Returns whether there was room for all of them.
        """
        absent = [e for e in experts if (layer, e) not in self.cache]
        room = max(0, self.window // self._layout.largest_expert() - len(self._guesses))
        known = [e for e in absent if self._guesses.get(layer, e)]
        new = [e for e in absent if not self._guesses.get(layer, e)]
        self._guess(layer, known + new[:room], "ahead", self.ahead)
        return len(new) <= room

    def finish_ahead(self) -> None:
        """The prompt is over: nothing more is read ahead for it, and what has been and was not used
        is forgotten.

        Waits for reads in flight, so that the next batch begins with none.
        """
        if self._guesses.any_ahead():
            self._abandon(None)

    def _abandon(self, layer: int | None) -> None:
        """Forgets the guesses of a layer, or (None) all that were read ahead."""
        self._guesses.revoke(self.lanes.revoke())
        start = time.perf_counter()
        for ticket in self._guesses.abandon(layer):
            with contextlib.suppress(ReadError):  # nobody uses the bytes
                ticket.wait()
        self.stall_s += time.perf_counter() - start
        self.table.give(self._guesses.sweep())

    def _guess(self, layer: int, absent: Sequence[int], kind: Kind, counts: Prefetch) -> None:
        reads: list[Read] = []
        if self.filling:
            absent = self.filling.release(layer, absent)
        for expert in absent:
            known = self._guesses.get(layer, expert)
            if known:  # it was taken back, or it was for the token before, and in flight
                if not known.wanted:
                    known.wanted, known.counts = True, counts
                    counts.issued += 1
                for read in known.take_revoked():
                    read.kind = kind
                    reads.append(read)
                continue
            made = self.table.reads(layer, expert, kind)
            self._guesses.add(layer, expert, Guess(made, counts, ahead=kind == "ahead"))
            counts.issued += 1
            reads += made
        if reads:
            self.lanes.submit(reads, kind)

    def protect(self, layer: int, experts: Sequence[int]) -> None:
        """Keeps what is resident of the `experts` of a later layer until it has been there."""
        self.cache.protect(layer, experts)

    def _redeem(self, layer: int, misses: Sequence[int]) -> dict[int, Guess]:
        """The layer has come to what was guessed for it, right or wrong.

        All guesses that no lane has begun are taken back from the queue; those that may still be
        of use are guessed again once the layer has its own.

        Returns those of the misses that lanes have begun.
        """
        self._guesses.revoke(self.lanes.revoke())
        found = {e: guess for e in misses if (guess := self._guesses.pop(layer, e)) and guess.begun}
        for guess in found.values():
            guess.counts.completed += 1
            guess.counts.landed += guess.landed
            guess.counts.useful += 1
        self._guesses.pass_by(layer)
        discarded = self._guesses.sweep()
        for key in discarded:
            self.cache.was_read(*key)
        self.table.give(discarded)
        return found

    def _join(
        self, layer: int, begun: dict[int, Guess], adopted: list[Load], kind: Kind
    ) -> list[Read]:
        """Adopts what lanes have begun and not ended; returns what no lane has begun of it, as
        reads of `kind`."""
        reads: list[Read] = []
        for guess in begun.values():
            if guess.landed:
                continue
            tickets = {
                tensor.projection: read.ticket
                for read in guess.reads
                for tensor in read.place.tensors
            }
            adopted.append(Load(layer, (), tickets))
            for read in guess.take_revoked():
                read.kind = kind  # it begins because the layer needs it
                reads.append(read)
        return reads

    def _adopt(self, early: Load, experts: Sequence[int], adopted: list[Load]) -> list[Read]:
        """The layer has come to what was read for it as certain; returns what no lane has begun."""
        self.prefetch.useful += len(set(early.experts).intersection(experts))
        if early.done():
            self.prefetch.completed += len(early.experts)
            self.prefetch.landed += len(early.experts)
            if early.failed():
                adopted.append(early)
            return []
        adopted.append(early)
        queued = self.lanes.adopt(early.layer)
        self._count_begun(early, queued)
        return queued

    def _count_begun(self, early: Load, queued: Sequence[Read]) -> None:
        """How far early reads have come when their layer asks; no lane has begun those `queued`."""
        waiting = Counter(read.expert for read in queued)
        landing = {read.expert for read in early.reads if not read.settled}
        each = len(set(early.tickets.values()))  # reads that bring an expert
        self.prefetch.completed += sum(waiting[expert] < each for expert in early.experts)
        self.prefetch.landed += len(early.experts) - len(landing)

    def _submit_in_order(self, reads: list[Read]) -> None:
        """A layer waits for these: first what it computes with first."""
        reads.sort(key=lambda read: self.table.rank(read.place))
        self.lanes.submit(reads)

    def _most_slots(self) -> int:
        """Bytes that slots may have before a pool that grows makes others give back: one layer's
        experts may stand beside the cache, and so may what is read early or ahead, whose slots are
        not given back to be taken again."""
        budget, early = self.cache.budget, self._token_bytes if self.prefetch.issued else 0
        layer = max(min(self._layer_bytes, self.cache.spare), self._layer_bytes - budget)
        return budget + layer + self.window + early

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
        """The step is over, and every layer has had its experts: nothing stays protected."""
        if self._early:  # a layer never came for its reads, which may be in flight
            self.recover()
        self.cache.release()

    def expose(self) -> None:
        """Makes all slots accessible: a graph whose result is void may still run products."""
        self._slots.expose()

    def recover(self) -> None:
        """After a fault: waits for the lanes, forgets every expert, and starts empty.

        A fault may have struck anywhere, between two lines of bookkeeping too, so nothing of the
        old state is trusted.
        """
        self._void = True
        self.lanes.drain()
        self._early.clear()
        self._guesses.clear()
        if self.filling:
            self.filling.clear()
        self.cache.clear()
        whole = self.cache.budget >= self._layout.expert_bytes
        self.table.lay_out(self.cache.parts, whole=whole)
        self._emptied = self.cache.emptied
        self._void = False

    def close(self) -> None:
        """Stops the lanes and lets go of all memory."""
        self.lanes.close()
        self.table.clear()
        self._early.clear()
        self._guesses.clear()
        self._slots.close()
