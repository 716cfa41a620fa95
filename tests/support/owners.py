"""Whether every thread touches only what is its own: a check of hand-overs, for tests.

As a race detector by locksets does (Savage et al., "Eraser", 1997), it does not wait for a race to
do harm: each access is compared with a rule, so one order of events finds what every order may
have. Where Eraser infers the lock of a variable, the rules are given, because most of what is
shared here is handed over and not locked (`experts.lanes` lists the hand-overs):

* *Owned*: the cache's books, slots, guesses, loads, filling and window are read and written by who
  has the cache alone (`engine.ownership`): the batch's thread, a borrower, and in between any
  thread that is no lane, watcher or predictor. Some numbers any thread may read; none but the owner
  writes them.
* *Held*: a read is written to by who built, popped or claimed it last; nobody does while it is
  queued. A prediction that was handed over is written to by the predictor, its `void` excepted.
* *Locked*: a ticket and the number of lanes change under the lanes' ledger.
* *Of one lane*: entry i of a lane's counters is written by lane i.

Only attributes are seen: who gets at a container through its attribute counts as using it.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from routeahead.engine.ownership import Ownership
from routeahead.engine.window import Usage, Window
from routeahead.experts import cache, lanes
from routeahead.experts.cache import ExpertCache
from routeahead.experts.decay import Decay
from routeahead.experts.eviction import LRU
from routeahead.experts.filling import Filling
from routeahead.experts.guesses import Guess, Guesses
from routeahead.experts.lanes import Lanes
from routeahead.experts.load import Load, Prefetch
from routeahead.experts.reads import Read, Ticket
from routeahead.experts.slot_table import LayerSlots, SlotTable
from routeahead.experts.slots import Pool
from routeahead.experts.source import ExpertSource
from routeahead.prediction.worker import Prediction, Worker

# Class → attributes that any thread may read.
OWNED: dict[type, set[str]] = {
    ExpertCache: {"hits", "misses", "evictions", "rereads"},
    cache._Part: set(),
    LRU: set(),
    Decay: set(),
    SlotTable: set(),
    LayerSlots: set(),
    Pool: {"_memory", "address", "stride"},
    Guesses: set(),
    Guess: set(),
    Load: set(),
    Filling: {"counts"},
    Usage: set(),
    Window: {"ubatch", "buffer", "most"},
}
# Class → attributes that the owner alone reads; it writes all of them.
WRITTEN: dict[type, set[str]] = {
    ExpertSource: {"_early", "_emptied", "_void"},
    Prefetch: set(),
}
# "May be called on any thread": what these read counts as read by the owner.
ANYWHERE: dict[type, str] = {
    ExpertCache: "used",
    SlotTable: "held",
    Pool: "held",
    Filling: "planned",
    ExpertSource: "held",
}
OF_ONE_LANE = {"_busy", "_bytes", "_early_bytes", "_ahead_bytes", "_idle_bytes", "_reads"}
OTHERS = ("lane-", "watcher", "predictor")  # threads that own nothing unless they borrow


class Ledger:
    """A lock that knows who has it."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.holder = lock, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.holder = 0
        self._lock.release()


class Entries(list[Any]):
    """Entry i is lane i's."""

    breach: Callable[[str], None]

    def __setitem__(self, index: Any, value: Any) -> None:
        if threading.current_thread().name != f"lane-{index}":
            self.breach(f"entry {index} of a lane's counters")
        super().__setitem__(index, value)


class Owners:
    """The rules, for one model at a time.

    Attributes:
        breaches: what was done, by which thread, and where.
        seen: accesses that were compared.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.breaches: list[str] = []
        self.seen = 0
        self._owner = 0  # thread that has the cache
        self._anywhere = threading.local()
        self._holders: dict[int, int] = {}  # id of a read → thread; 0: it is queued
        self._idle: list[object] = []  # queues whose reads are claimed
        self._ledgers: list[Ledger] = []
        self._set = monkeypatch.setattr
        self._watch_ownership()
        for owned, free in OWNED.items():
            self._own(owned, free)
        for written, closed in WRITTEN.items():
            self._own(written, None, closed)
        for kind, name in ANYWHERE.items():
            self._let(kind, name)
        self._watch_reads()
        self._watch_predictions()
        self._watch_lanes()
        self._lock(Ticket, {"remaining", "error"})

    def check(self) -> None:
        assert not self.breaches, f"{len(self.breaches)} breaches, the first: {self.breaches[0]}"

    def _breach(self, what: str) -> None:
        place = traceback.extract_stack(limit=8)[:-2]
        way = " < ".join(f"{one.name}:{one.lineno}" for one in reversed(place))
        self.breaches.append(f"{threading.current_thread().name} touches {what} ({way})")

    # --- owned ---

    def _watch_ownership(self) -> None:
        take, give, borrow = Ownership.take, Ownership.give, Ownership.borrow

        def taken(own: Ownership) -> None:
            take(own)
            self._owner = threading.get_ident()

        def given(own: Ownership) -> None:
            self._owner = 0
            give(own)

        def borrowed(own: Ownership, work: Callable[[], None]) -> bool:
            def owning() -> None:
                self._owner = threading.get_ident()
                try:
                    work()
                finally:
                    self._owner = 0

            return borrow(own, owning)

        self._set(Ownership, "take", taken)
        self._set(Ownership, "give", given)
        self._set(Ownership, "borrow", borrowed)

    def _owns(self) -> bool:
        self.seen += 1
        if self._owner:
            return self._owner == threading.get_ident()
        return not threading.current_thread().name.startswith(OTHERS)

    def _own(self, kind: type, free: set[str] | None, closed: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Of all attributes but `free` (or, if that is None, of those `closed` alone) the owner is
        the only reader, and of all of them the only writer."""
        plain, write = object.__getattribute__, kind.__setattr__

        def get(this: Any, name: str) -> Any:
            guarded = name in closed if free is None else name not in free
            mine = guarded and name[:2] != "__" and name in plain(this, "__dict__")
            if mine and not getattr(self._anywhere, "on", False) and not self._owns():
                self._breach(f"{kind.__name__}.{name}")
            return plain(this, name)

        def put(this: Any, name: str, value: Any) -> None:
            if not self._owns():
                self._breach(f"{kind.__name__}.{name} (writing)")
            write(this, name, value)

        self._set(kind, "__getattribute__", get, raising=False)
        self._set(kind, "__setattr__", put, raising=False)

    def _let(self, kind: type, name: str) -> None:
        read = vars(kind)[name].fget

        def anywhere(this: Any) -> Any:
            outer = getattr(self._anywhere, "on", False)
            self._anywhere.on = True
            try:
                return read(this)
            finally:
                self._anywhere.on = outer

        self._set(kind, name, property(anywhere))

    # --- held ---

    def _watch_reads(self) -> None:
        pop, make, claim, submit = lanes._pop, Read.__init__, Read.claim, Lanes.submit
        put = Read.__setattr__

        def made(read: Read, *arguments: Any) -> None:
            self._holders[id(read)] = threading.get_ident()
            make(read, *arguments)

        def popped(queue: deque[Read]) -> Read | None:
            read = pop(queue)
            if read and not any(queue is idle for idle in self._idle):
                self._holders[id(read)] = threading.get_ident()
            return read

        def claimed(read: Read) -> bool:
            won = claim(read)
            if won:
                self._holders[id(read)] = threading.get_ident()
            return won

        def submitted(of: Lanes, reads: Any, kind: Any = "demand") -> None:
            if not self._owns():
                self._breach("the queues (submitting)")
            for read in reads:
                self._holders[id(read)] = 0
            submit(of, reads, kind)

        def written(read: Read, name: str, value: Any) -> None:
            self.seen += 1
            if self._holders.get(id(read)) != threading.get_ident():
                self._breach(f"Read.{name} (writing)")
            put(read, name, value)

        self._set(lanes, "_pop", popped)
        self._set(Read, "__init__", made)
        self._set(Read, "claim", claimed)
        self._set(Lanes, "submit", submitted)
        self._set(Read, "__setattr__", written, raising=False)

    def _watch_predictions(self) -> None:
        make, submit, put = Prediction.__init__, Worker.submit, Prediction.__setattr__
        handed: set[int] = set()

        def made(prediction: Prediction, *arguments: Any) -> None:
            handed.discard(id(prediction))
            make(prediction, *arguments)

        def submitted(worker: Worker, prediction: Prediction) -> None:
            handed.add(id(prediction))
            submit(worker, prediction)

        def written(prediction: Prediction, name: str, value: Any) -> None:
            self.seen += 1
            theirs = id(prediction) in handed and name != "void"
            if theirs != threading.current_thread().name.startswith("predictor"):
                self._breach(f"Prediction.{name} (writing)")
            put(prediction, name, value)

        self._set(Prediction, "__init__", made)
        self._set(Worker, "submit", submitted)
        self._set(Prediction, "__setattr__", written, raising=False)

    # --- locked, and of one lane ---

    def _watch_lanes(self) -> None:
        put = Lanes.__setattr__
        breach = self._breach

        def written(of: Lanes, name: str, value: Any) -> None:
            if name == "_ledger":
                value = Ledger(value)
                self._ledgers.append(value)
            elif name == "_idle":
                self._idle.append(value)
            elif name in OF_ONE_LANE:
                value = Entries(value)
                value.breach = breach
            elif name == "_alive" and "_threads" in vars(of) and not self._locked():
                breach("Lanes._alive (writing)")
            put(of, name, value)

        self._set(Lanes, "__setattr__", written, raising=False)
        for name in ("adopt", "revoke", "drain"):
            self._set(Lanes, name, self._owning(getattr(Lanes, name)))

    def _owning(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any) -> Any:
            if not self._owns():
                self._breach(f"the queues ({method.__name__})")
            return method(*arguments)

        return checked

    def _locked(self) -> bool:
        me = threading.get_ident()
        return any(ledger.holder == me for ledger in self._ledgers)

    def _lock(self, kind: type, names: set[str]) -> None:
        put = kind.__setattr__

        def written(this: Any, name: str, value: Any) -> None:
            self.seen += 1
            if name in names and hasattr(this, name) and not self._locked():
                self._breach(f"{kind.__name__}.{name} (writing)")
            put(this, name, value)

        self._set(kind, "__setattr__", written, raising=False)


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owners]:
    made = Owners(monkeypatch)
    yield made
