"""A read, the ticket that it counts down, and what a trace keeps of it.

`experts.lanes` says which thread may touch them when.
"""

from __future__ import annotations

import _thread
from typing import Literal, NamedTuple

from routeahead.experts.slots import Place, Pool

Kind = Literal["demand", "committed", "ahead", "speculative", "idle"]
GUESSED: tuple[Kind, Kind] = ("ahead", "speculative")

_NOTHING: list[None] = []  # to be claimed


class Ticket:
    """Counts down a group of reads; one thread waits for it.

    There is a lock only while somebody waits: of what is read early, most has arrived by then.

    Attributes:
        remaining: reads that have not ended.
        error: the first exception among the reads, or None.
    """

    __slots__ = ("_settled", "error", "remaining")

    def __init__(self, count: int) -> None:
        self.remaining = count
        self.error: BaseException | None = None
        self._settled: _thread.LockType | None = None  # held until every read has ended

    @property
    def done(self) -> bool:
        return self.remaining == 0

    def wait(self) -> None:
        """Blocks until every read has settled.

        Raises:
            ReadError: one of them failed; none of the ticket's bytes may be used.
        """
        if self.remaining:
            settled = _thread.allocate_lock()
            settled.acquire()
            self._settled = settled
            if self.remaining:  # looked at after the lock is there: see `settle`
                settled.acquire()
        if self.error:
            raise self.error

    def settle(self, error: BaseException | None) -> None:
        """Counts one read as ended; the caller holds `Lanes._ledger`."""
        self.error = self.error or error
        self.remaining -= 1
        if self.remaining == 0:  # before it looks for the lock: who waits finds this, or is found
            settled = self._settled
            if settled:
                settled.release()


class Read:
    """One expert's slice of a projection, or its slices of several that stand side by side in the
    file, on the way into its slot.

    Attributes:
        place: the projections, and where they lie in a slot.
        pool, slot: where it is read into.
        ticket: who waits for it.
        kind: "demand" if a layer waits for it, "committed" if a later layer will certainly use it,
            "ahead" if one of a prompt's is expected to, "speculative" if one may, "idle" if nobody
            asked.
        adopted: its layer has come before any lane, so that it is early no more.
        settled: it has ended; a lane sets it.
    """

    __slots__ = (
        "_unclaimed", "adopted", "expert", "kind", "place", "pool", "settled", "slot", "ticket",
    )  # fmt: skip

    def __init__(
        self, place: Place, expert: int, pool: Pool, slot: int, ticket: Ticket, kind: Kind
    ) -> None:
        self.place, self.expert, self.pool, self.slot = place, expert, pool, slot
        self.ticket, self.kind = ticket, kind
        self.adopted = self.settled = False
        self._unclaimed = [None] if kind == "idle" else _NOTHING

    @property
    def layer(self) -> int:
        return self.place.layer

    def claim(self) -> bool:
        """Whether an idle read is the caller's from now on: it is for the first one who asks."""
        try:
            self._unclaimed.pop()  # atomic
        except IndexError:
            return False
        return True

    def __str__(self) -> str:
        return f"layer {self.layer} expert {self.expert} ({self.place.projections})"


class ReadRecord(NamedTuple):
    """A read as a trace records it. Times are from `time.perf_counter`."""

    begin: float
    end: float
    lane: int
    kind: Kind
    layer: int
    expert: int
    projection: str
    shard: int
    offset: int
    nbytes: int
