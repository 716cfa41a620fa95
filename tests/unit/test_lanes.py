"""Lanes: the order of reads, and what is cancelled."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest

from routeahead.errors import ReadError, SettingsError
from routeahead.experts.lanes import Lanes
from routeahead.experts.layout import BLOCK, ExpertTensor
from routeahead.experts.reads import Kind, Read, Ticket
from routeahead.experts.slots import Slots


class Gated:
    """Lets reads through one by one, and remembers their order."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        self.order.append(offset // BLOCK)
        self.begun.release()
        self.allowed.acquire()
        return need

    def close(self) -> None:
        pass


def reads(layer: int, *offsets: int, kind: Kind = "demand") -> tuple[list[Read], Ticket]:
    tensor = ExpertTensor("t", layer, "up", "F32", 8, 0, 0, BLOCK, BLOCK)
    ticket = Ticket(len(offsets))
    slots = Slots([tensor])
    (pool,) = slots.share_out([[layer]])
    (place,) = slots.places[layer]
    return [Read(place, o, pool, 0, ticket, kind) for o in offsets], ticket


def test_demand_goes_first_and_a_layer_adopts_its_own() -> None:
    reader = Gated()
    lanes = Lanes(1, reader, Slots([]))
    (of_five, five), (of_six, six) = (
        reads(5, 1, 2, 3, kind="committed"),
        reads(6, 4, kind="committed"),
    )
    lanes.submit(of_five, "committed")
    lanes.submit(of_six, "committed")
    reader.begun.acquire()  # 1 is in flight
    demand, needed = reads(4, 9)
    lanes.submit(demand)
    adopted = lanes.adopt(5)
    assert [read.expert for read in adopted] == [2, 3]
    assert lanes.adopt(5) == []
    lanes.submit(adopted)
    for _ in range(5):
        reader.allowed.release()
    for ticket in (five, six, needed):
        ticket.wait()
    assert reader.order == [1, 9, 2, 3, 4]
    # 2 and 3 began when their layer was waiting.
    assert lanes.early_bytes == 2 * BLOCK and lanes.bytes_read == 5 * BLOCK
    lanes.close()


def test_lanes_that_are_busy_are_not_woken() -> None:
    """One token for each lane that has to be woken, however many submissions follow."""
    reader = Gated()
    lanes = Lanes(2, reader, Slots([]))
    first, done = reads(5, 1, 2)
    lanes.submit(first)
    for _ in range(2):
        reader.begun.acquire()
    tickets = [done]
    for number in range(3, 9):
        more, ticket = reads(5, number, kind="committed")
        lanes.submit(more, "committed")
        tickets.append(ticket)
    assert lanes._wake.qsize() == 0
    for _ in range(8):
        reader.allowed.release()
    for ticket in tickets:
        ticket.wait()
    assert sorted(reader.order) == list(range(1, 9))
    lanes.close()


def test_reads_that_come_while_a_lane_falls_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued just after it has looked and found nothing: before it says that it is asleep, and
    after that."""
    lanes = Lanes(1, Instant(), Slots([]))
    (one, two, three), tickets = zip(*(reads(5, number) for number in (1, 2, 3)), strict=True)
    coming, look = [three, two], Lanes._next

    def look_and_miss(self: Lanes, lane: int) -> Read | None:
        read = look(self, lane)
        if read is None and coming:
            self.submit(coming.pop())
        return read

    monkeypatch.setattr(Lanes, "_next", look_and_miss)
    lanes.submit(one)
    for ticket in tickets:
        assert call_with_limit(ticket.wait), "nobody reads it"
    assert not coming
    lanes.close()


def test_drain_waits_for_what_is_in_flight_and_cancels_the_rest() -> None:
    reader = Gated()
    lanes = Lanes(2, reader, Slots([]))
    queued, ticket = reads(5, 1, 2, 3, 4, kind="committed")
    lanes.submit(queued, "committed")
    for _ in range(2):
        reader.begun.acquire()
    drained = threading.Thread(target=lanes.drain)
    drained.start()
    drained.join(0.05)
    assert drained.is_alive() and not ticket.done
    for _ in range(2):
        reader.allowed.release()
    drained.join()
    assert ticket.done and ticket.error and sorted(reader.order) == [1, 2]
    more, later = reads(6, 7)
    reader.allowed.release()
    lanes.submit(more)
    later.wait()
    lanes.close()


class Instant:
    """Reads nothing, at once."""

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        return need

    def close(self) -> None:
        pass


def call_with_limit(function: Callable[[], object]) -> bool:
    """Whether `function` ends, in a thread that may stay behind."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def settled(ticket: Ticket) -> None:
    with contextlib.suppress(ReadError, SystemError):
        ticket.wait()


def interrupted_at(line: int, function: Callable[[], object]) -> bool:
    """Runs `function`, raises KeyboardInterrupt before its `line`th line; whether it has that many.

    Not before `pass`, nor before a line that is passed again: at the end of a `with` that is its
    exit. The interpreter lets no signal in there.
    """
    passed: set[int] = set()

    def trace(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code is not function.__code__:  # type: ignore[attr-defined]
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and text != "pass" and frame.f_lineno not in passed:
            passed.add(frame.f_lineno)
            if len(passed) == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_anywhere_in_drain_leaves_the_lanes_usable() -> None:
    lanes = Lanes(2, Instant(), Slots([]))
    line = 1
    while interrupted_at(line, lanes.drain):
        queued, ticket = reads(1, 1, 2, 3)
        lanes.submit(queued)
        assert call_with_limit(ticket.wait), f"lanes hang after an interrupt at line {line}"
        line += 1
    assert line > 2
    assert call_with_limit(lanes.drain) and call_with_limit(lanes.close)


@pytest.mark.parametrize("dying", [1, 2])
def test_lanes_that_die(monkeypatch: pytest.MonkeyPatch, dying: int) -> None:
    """What waits is told, the others go on, and `drain` starts new ones."""
    lanes = Lanes(2, Instant(), Slots([]))
    run, left = Lanes._run, [None] * dying

    def deadly(self: Lanes, lane: int, read: Read) -> None:
        if left:
            left.pop()
            self._settle(read, SystemError("killed"))
            raise SystemError("killed")
        run(self, lane, read)

    monkeypatch.setattr(Lanes, "_run", deadly)
    # A thread that ends says why, which takes its time: it counts as alive meanwhile.
    monkeypatch.setattr(threading, "excepthook", lambda _: time.sleep(0.2))
    for number in range(4):
        queued, ticket = reads(1, number)
        lanes.submit(queued)
        assert call_with_limit(lambda ticket=ticket: settled(ticket)), "the ticket never settles"
    assert not left
    lanes.drain()
    queued, ticket = reads(1, 1, 2, 3, 4)
    lanes.submit(queued)
    assert call_with_limit(ticket.wait) and not ticket.error
    assert sum(thread.name.startswith("lane-") for thread in threading.enumerate()) == 2
    lanes.close()


def test_a_lane_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's limit of threads: one line, and no lane stays behind."""
    start, allowed = threading.Thread.start, [None] * 2

    def refuse(thread: threading.Thread) -> None:
        if not allowed:
            raise RuntimeError("can't start new thread")
        allowed.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(SettingsError, match=r"thread for lane 3 of 4: .*fewer io_threads"):
        Lanes(4, Instant(), Slots([]))
    assert not any(thread.name.startswith("lane-") for thread in threading.enumerate())


def test_close_ends_a_lane_that_was_started_twice() -> None:
    """An interrupt inside of `Thread.start` leaves a thread that does not look alive yet."""
    lanes = Lanes(2, Instant(), Slots([]))
    first = lanes._threads[0]
    lanes._threads[0] = None  # as if it had not begun
    lanes.drain()
    queued, ticket = reads(1, 1, 2, 3, 4)
    lanes.submit(queued)
    assert call_with_limit(ticket.wait) and not ticket.error
    assert call_with_limit(lanes.close) and first
    first.join(5)
    assert not first.is_alive()


def test_idle_reads_are_served_one_at_a_time_and_last() -> None:
    """With two lanes: one idle read in flight, and none begins while another kind is."""
    reader = Gated()
    lanes = Lanes(2, reader, Slots([]))
    idle, _ = reads(5, 1, 2, 3, 4, kind="idle")
    lanes.submit(idle, "idle")
    reader.begun.acquire()
    assert not reader.begun.acquire(timeout=0.05)  # the other lane leaves it alone
    demand, needed = reads(6, 8, 9)
    lanes.submit(demand)
    reader.begun.acquire()  # and is there for who asks
    assert reader.order == [1, 8]
    reader.allowed.release()
    reader.begun.acquire()
    assert reader.order[2] == 9  # whichever read ended
    for _ in range(2):
        reader.allowed.release()
    needed.wait()
    for _ in range(3):
        reader.allowed.release()
    while lanes.idle_queued or lanes.reads < 6:
        pass
    assert reader.order == [1, 8, 9, 2, 3, 4]
    assert lanes.idle_bytes == 4 * BLOCK and lanes.early_bytes == 0
    lanes.close()


def test_an_idle_read_has_one_owner() -> None:
    """Taken back while lanes take them: each is read once or never, and whoever has it knows."""
    lanes = Lanes(3, Instant(), Slots([]))
    for _ in range(200):
        idle, _ = reads(5, *range(8), kind="idle")
        tickets = [Ticket(1) for _ in idle]
        for read, ticket in zip(idle, tickets, strict=True):
            read.ticket = ticket
        lanes.submit(idle, "idle")
        mine = [read for read in reversed(idle) if read.claim()]
        before = lanes.reads
        for read, ticket in zip(idle, tickets, strict=True):
            if read not in mine:
                ticket.wait()
            else:
                assert not ticket.done
        assert lanes.reads >= before
    lanes.close()
    assert not lanes.idle_queued


def test_no_idle_read_is_forgotten_beside_demand() -> None:
    """Both kinds come in at once, over and over: all end without another wake-up."""
    lanes = Lanes(2, Instant(), Slots([]))
    for _ in range(300):
        idle, done = reads(5, 1, 2, kind="idle")
        demand, needed = reads(6, 3, 4, 5)
        lanes.submit(idle, "idle")
        lanes.submit(demand)
        assert call_with_limit(needed.wait) and call_with_limit(done.wait)
    lanes.close()


def test_cancel_settles_idle_reads_that_are_queued() -> None:
    reader = Gated()
    lanes = Lanes(1, reader, Slots([]))
    idle, ticket = reads(5, 1, 2, 3, kind="idle")
    lanes.submit(idle, "idle")
    reader.begun.acquire()
    assert idle[2].claim()
    lanes.cancel()
    reader.allowed.release()
    while ticket.remaining > 1:
        pass
    assert ticket.error and reader.order == [1]  # the third is its owner's
    lanes.close()


def before_line(function: Callable[..., object], line: int, act: Callable[[], None]) -> None:
    """On this thread, `act` happens before the line of that number that `function` runs, from 0."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal left
        if frame.f_code is not function.__code__:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                act()
        return trace

    sys.settrace(trace)


@pytest.mark.parametrize("line", range(6))
def test_a_read_may_end_at_any_line_of_a_wait(line: int) -> None:
    ticket = Ticket(1)

    def wait() -> None:
        before_line(Ticket.wait, line, lambda: ticket.settle(None))
        ticket.wait()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and ticket.done


@pytest.mark.parametrize("line", range(5))
def test_a_wait_may_begin_at_any_line_of_a_reads_end(line: int) -> None:
    ticket = Ticket(1)
    thread = threading.Thread(target=ticket.wait, daemon=True)

    def begin() -> None:
        thread.start()
        while thread.is_alive() and not (ticket._settled and ticket._settled.locked()):
            time.sleep(0.001)
        time.sleep(0.01)  # it waits, if it is going to

    before_line(Ticket.settle, line, begin)
    ticket.settle(None)
    sys.settrace(None)
    thread.join(20)
    assert not thread.is_alive()
