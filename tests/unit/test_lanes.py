"""Lanes: the order of reads, and what is cancelled."""

from __future__ import annotations

import threading
from pathlib import Path

from routeahead.experts.arena import Arena, Pages
from routeahead.experts.lanes import Kind, Lanes, Read, Slice, Ticket
from routeahead.experts.layout import BLOCK, ExpertTensor, Shard


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
    tensor = ExpertTensor("t", layer, "up", "F32", 8, 0, 0, BLOCK)
    ticket = Ticket(len(offsets))
    view = memoryview(bytearray(BLOCK))
    slices = [Slice(tensor, o, o * BLOCK, view, BLOCK, Pages(0, 0)) for o in offsets]
    return [Read(one, ticket, kind) for one in slices], ticket


def test_demand_goes_first_and_a_layer_adopts_its_own() -> None:
    reader = Gated()
    lanes = Lanes(1, reader, Arena([Shard(Path("none"), BLOCK)]))
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
    assert [read.slice.expert for read in adopted] == [2, 3]
    assert lanes.adopt(5) == []
    lanes.submit(adopted)
    for _ in range(5):
        reader.allowed.release()
    for ticket in (five, six, needed):
        ticket.wait()
    assert reader.order == [1, 9, 2, 3, 4]
    assert lanes.early_bytes == 4 * BLOCK and lanes.bytes_read == 5 * BLOCK
    lanes.close()


def test_drain_waits_for_what_is_in_flight_and_cancels_the_rest() -> None:
    reader = Gated()
    lanes = Lanes(2, reader, Arena([Shard(Path("none"), BLOCK)]))
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
