"""Lanes: threads that read experts from the files into slots.

Hand-overs between threads ("the evaluation thread" is, between two batches, whichever thread has
borrowed the cache: `engine.ownership`):

* The evaluation thread builds a `Read`, and from `submit` on does not touch it; a lane owns it
  until it settles the read's `Ticket`.
* A ticket's count is changed only under `Lanes._ledger`, after the bytes of the read. Who finds it
  zero may use the bytes of all of the ticket's reads. The evaluation thread that finds another
  number in `Ticket.wait` leaves a lock, looks at the count again, and waits for the lock; the lane
  that takes the count to zero looks for a lock then, and releases it. Whichever of both comes
  first, one of them sees what the other did.
* Queues are `deque`s: `append` and `popleft` are atomic. A lane that finds them empty declares that
  it is *asleep*, looks once more, and waits for a token. A submission first queues its reads, then
  hands out as many tokens as there are lanes asleep, less those that wait to be taken: whoever is
  not asleep, or has a token to take, is going to look. So no read is left in a queue, and lanes
  that are busy are not woken again for every submission.
* Five queues: *demand* (a layer waits) is served before *committed* (a later layer will certainly
  use it), that before *ahead* (a later layer of a prompt, whose rows together use nearly all
  experts), and that before *speculative* (a guess). The evaluation thread alone adds to them, and
  takes a layer's committed reads (`adopt`) or all of the last two kinds (`revoke`) back out, while
  lanes take from the front too: whoever pops a read owns it.
* The fifth, *idle*, is long, and reads stay in it when the evaluation thread takes them back:
  whoever *claims* such a read owns it (`experts.filling`). Lanes serve it one at a time, so that a
  layer that asks meanwhile has the others, and only while none of them serves anything else. No
  wake-up is lost: a lane that leaves the queue to another one does so because that one is in a
  read, after which it looks again.
* `drain` returns when every lane is at rest. A lane takes reads from the queues and runs them while
  it holds its *desk* lock. `drain` empties the queues and then takes each desk once: after that no
  lane is in a read, and none begins one, because only the evaluation thread submits any. A signal
  that interrupts `drain` leaves nothing behind that a lane could wait for.
* A lane that dies (an exception from outside, such as a thread that is killed) first settles its
  read. The last one to die cancels what is queued; `submit` does the same if it finds no lane
  alive. Both may do so at once. A lane that dies at its desk says so before it leaves it. `drain`
  waits until such a thread has ended, because it counts as alive until then, and starts new lanes
  in place of dead ones.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

from routeahead.errors import ReadError, no_thread
from routeahead.experts.arena import Pages
from routeahead.experts.reader import Reader, read_whole
from routeahead.experts.reads import GUESSED, Kind, Read, ReadRecord
from routeahead.experts.slots import Slots


class Lanes:
    """`count` threads that serve reads: by kind, then oldest submission first."""

    def __init__(self, count: int, reader: Reader, slots: Slots) -> None:
        self._reader, self._slots = reader, slots
        self._queues: dict[Kind, deque[Read]] = {
            "demand": deque(), "committed": deque(), "ahead": deque(), "speculative": deque(),
        }  # fmt: skip
        self._idle: deque[Read] = deque()
        self._idle_lane = [None]  # taken out by the lane that serves it
        self._pressed = [False] * count  # in a read of another kind; entry i is lane i's
        self._asleep = [True] * count  # a lane has to be woken; the same
        self.paused = False  # no idle read begins
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._ledger = threading.Lock()
        self._desks = [threading.Lock() for _ in range(count)]
        self._busy = [0.0] * count  # seconds; entry i is written by lane i alone
        self._bytes = [0] * count
        self._early_bytes = [0] * count
        self._ahead_bytes = [0] * count
        self._idle_bytes = [0] * count
        self._reads = [0] * count
        self.records: list[ReadRecord] | None = None  # of reads that have ended, for a trace
        self._alive = 0  # lanes that serve; changed under `_ledger`
        self._dying = [False] * count  # entry i is lane i's, while it has its desk
        self._threads: list[threading.Thread | None] = [None] * count
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def busy_s(self) -> float:
        """Seconds that lanes spent in reads, summed over lanes."""
        return sum(self._busy)

    @property
    def bytes_read(self) -> int:
        """Physical bytes, whole blocks."""
        return sum(self._bytes)

    @property
    def early_bytes(self) -> int:
        """The part of `bytes_read` whose reads a lane began before their layer asked."""
        return sum(self._early_bytes)

    @property
    def ahead_bytes(self) -> int:
        """The part of `bytes_read` that a prompt's layers had read before they asked."""
        return sum(self._ahead_bytes)

    @property
    def idle_bytes(self) -> int:
        """The part of `bytes_read` that nobody had asked for."""
        return sum(self._idle_bytes)

    @property
    def idle_queued(self) -> int:
        """Idle reads in the queue, with those that were taken back. May be called on any thread."""
        return len(self._idle)

    @property
    def reads(self) -> int:
        return sum(self._reads)

    def submit(self, reads: Sequence[Read], kind: Kind = "demand") -> None:
        """Queues reads as `kind`, which may be more urgent than what they were made as."""
        (self._idle if kind == "idle" else self._queues[kind]).extend(reads)
        for _ in range(min(len(reads), sum(self._asleep) - self._wake.qsize())):
            self._wake.put(True)
        if not self._alive:
            self.cancel()

    def adopt(self, layer: int) -> list[Read]:
        """Takes back those of the committed reads of `layer` that no lane has begun.

        They are the oldest in the queue, because reads are committed in the order of the layers and
        each layer adopts its own before the next one does.
        """
        adopted: list[Read] = []
        queue = self._queues["committed"]
        while read := _pop(queue):
            if read.layer != layer:
                queue.appendleft(read)
                break
            read.adopted = True
            adopted.append(read)
        return adopted

    def revoke(self) -> list[Read]:
        """Takes back every guess ("ahead" and "speculative") that no lane has begun."""
        revoked: list[Read] = []
        for kind in GUESSED:
            while read := _pop(self._queues[kind]):
                revoked.append(read)
        return revoked

    def cancel(self) -> None:
        """Settles reads that no lane has begun with an error; those in flight continue."""
        for queue in self._queues.values():
            while read := _pop(queue):
                self._settle(read, ReadError(f"{read}: cancelled"))
        while read := _pop(self._idle):
            if read.claim():
                self._settle(read, ReadError(f"{read}: cancelled"))

    def pause(self) -> None:
        """No idle read begins until `resume`. May be called on any thread."""
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self._wake.put(True)

    def drain(self) -> None:
        """Cancels what no lane has begun and returns when no lane is reading.

        Raises:
            SettingsError: a lane has died, and the system refuses to start another.
        """
        self.cancel()
        for desk in self._desks:
            with desk:
                pass
        for dying, thread in zip(self._dying, self._threads, strict=False):
            if dying and thread:
                thread.join()
        if not all(thread and thread.is_alive() for thread in self._threads):
            self._start()

    def close(self) -> None:
        self.cancel()
        self._wake.put(False)  # each lane hands it on
        for thread in self._threads:
            if thread and thread.is_alive():
                thread.join()
        self._threads = []  # `drain` starts none anew

    def forked(self) -> None:
        """In a child process, after a fork: the threads exist in the parent alone, and locks that
        they held there would stay locked here."""
        self._threads, self._desks, self._asleep, self._alive = [], [], [], 0
        self._ledger = threading.Lock()

    def _start(self) -> None:
        """Starts the lanes that do not run."""
        for lane, old in enumerate(self._threads):
            if old and old.is_alive():
                continue
            name = f"lane-{lane}"
            thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
            self._dying[lane] = False  # before the thread that is not to be joined stands there
            self._threads[lane], self._asleep[lane] = thread, True
            with self._ledger:
                self._alive += 1
            try:
                thread.start()
            except RuntimeError:
                with self._ledger:
                    self._alive -= 1
                raise no_thread(f"lane {lane + 1} of {len(self._threads)}") from None

    def _serve(self, lane: int) -> None:
        desk = self._desks[lane]
        try:
            while self._wake.get():
                self._asleep[lane] = False
                with desk:
                    self._work(lane)
            self._wake.put(False)
        except BaseException:
            self._pressed[lane] = False
            self._wake.put(True)  # what woke this lane is another one's now
            raise
        finally:
            self._asleep[lane] = False
            with self._ledger:
                self._alive -= 1
            if not self._alive:
                self.cancel()

    def _work(self, lane: int) -> None:
        """Runs reads until there are none."""
        try:
            while read := self._next(lane) or self._last_look(lane):
                self._run(lane, read)
        except BaseException:
            self._dying[lane] = True
            raise

    def _last_look(self, lane: int) -> Read | None:
        """The lane found nothing: what has come in meanwhile has not woken it."""
        self._asleep[lane] = True
        read = self._next(lane)
        self._asleep[lane] = read is None
        return read

    def _next(self, lane: int) -> Read | None:
        for queue in self._queues.values():
            if read := _pop(queue):
                self._pressed[lane] = True
                return read
        self._pressed[lane] = False
        return self._next_idle() if self._idle and not self.paused else None

    def _next_idle(self) -> Read | None:
        """The next idle read that nobody has claimed, if this is the lane to serve it."""
        if any(self._pressed):
            return None
        try:
            self._idle_lane.pop()
        except IndexError:
            return None
        while read := _pop(self._idle):
            if read.claim():
                return read
        self._idle_lane.append(None)
        return None

    def _run(self, lane: int, read: Read) -> None:
        error: BaseException | None = ReadError(f"{read}: its lane died")
        try:
            error = self._read(lane, read)
        finally:  # whatever happens, or the waiting thread would hang
            if read.kind == "idle":
                self._idle_lane.append(None)
            self._settle(read, error)

    def _read(self, lane: int, read: Read) -> BaseException | None:
        """Reads, counts, and returns what went wrong."""
        error: BaseException | None = None
        place, expert = read.place, read.expert
        offset, got, start = 0, 0, time.perf_counter()
        try:
            offset, view, need, shift = read.pool.target(place, expert, read.slot)
            self._slots.provide(view)
            got = read_whole(self._reader, place.shard, offset, view, need)
            if shift:
                address = Pages.of(view).address
                ctypes.memmove(address, address + shift, place.nbytes)
            self._bytes[lane] += got
            if read.kind == "ahead":
                self._ahead_bytes[lane] += got
            elif read.kind == "idle":
                self._idle_bytes[lane] += got
            elif read.kind != "demand" and not read.adopted:
                self._early_bytes[lane] += got
            self._reads[lane] += 1
        except ReadError as caught:
            error = ReadError(f"{read}: {caught}")
        except BaseException as caught:
            error = caught
        end = time.perf_counter()
        self._busy[lane] += end - start
        if self.records is not None:
            self.records.append(
                ReadRecord(
                    start, end, lane, read.kind, place.layer, expert, place.projections,
                    place.shard, offset, got,
                )
            )  # fmt: skip
        return error

    def _settle(self, read: Read, error: BaseException | None) -> None:
        with self._ledger:
            read.settled = True
            read.ticket.settle(error)


def _pop(queue: deque[Read]) -> Read | None:
    """The oldest read; None if there is none or another thread took it."""
    try:
        return queue.popleft() if queue else None
    except IndexError:
        return None
