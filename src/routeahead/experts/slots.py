"""Where expert bytes live: slots in huge pages that stay whole and never move.

A *slot* holds one expert: its projections, one behind the other, each with a block to spare, or all
with one block if they stand side by side in the file (`experts.packed`). All slots of a *pool* have
the same size, so a product over experts finds slot s at `data + s * stride`, whatever expert it
holds: the graph is given slot numbers instead of expert numbers, and a stride that is not the
file's. Layers whose experts are equally large may share a pool.

A read of whole blocks lands in its slot with no copy if what is read of each expert begins at the
same place of a block, which it does if from one expert to the next are a multiple of BLOCK bytes
(GGUF aligns tensors to 32 bytes only). Other bytes are moved down by less than a block after the
read.

The memory is taken from the kernel when a slot is first read into and kept. Why huge pages, and why
they must not be split: docs/architecture.md, "Pages".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from routeahead.experts.arena import HUGE, Pages, Reservation, protect, release
from routeahead.experts.layout import (
    BLOCK,
    ExpertTensor,
    Piece,
    ceil_block,
    floor_block,
    pieces,
    range_of,
)


class Place(NamedTuple):
    """Where what one read brings of an expert lies in the file, and inside the slots of its layer.

    Attributes:
        tensors: of which it brings a slice each, as they follow each other.
        projections: theirs, as in "gate+up+down".
        offset, stride: in the file, of expert 0, and from one expert to the next.
        nbytes: of an expert.
        start: bytes from the start of the slot to the blocks that are read.
        phase: bytes from there to the first slice.
    """

    tensors: Piece
    projections: str
    layer: int
    shard: int
    offset: int
    stride: int
    nbytes: int
    start: int
    phase: int


class Target(NamedTuple):
    """What a read of an expert fills.

    Attributes:
        offset: bytes from the start of the file, a whole block.
        view: whole blocks of a slot.
        need: bytes of `view` that must arrive.
        shift: bytes by which what was read must be moved down afterwards.
    """

    offset: int
    view: memoryview
    need: int
    shift: int


class Pool:
    """Slots of one size, numbered from 0; the lowest free one is taken first.

    Owned by the evaluation thread. A slot is free once no read of it is in flight and nothing
    computes with it.

    Attributes:
        address: of slot 0.
        stride: bytes from one slot to the next.
        count: slots from 0 on that were ever taken, less free ones at the end (`shrink`).
    """

    def __init__(self, memory: memoryview, address: int, stride: int) -> None:
        self._memory, self.address, self.stride = memory, address, stride
        self._free: list[int] = []
        self._empty: set[int] = set()  # those of them that have no memory
        self._given = False  # a slot was, since `shrink`
        self.count = 0

    @property
    def held(self) -> int:
        """Bytes of memory that its slots have. May be called on any thread."""
        return (self.count - len(self._empty)) * self.stride

    def take(self) -> int:
        if self._free:
            slot = heapq.heappop(self._free)
            self._empty.discard(slot)
            return slot
        self.count += 1
        return self.count - 1

    def give(self, slot: int) -> None:
        self._given = True
        heapq.heappush(self._free, slot)

    def shrink(self) -> None:
        """Returns the memory of free slots to the kernel: of those at the end, and between slots in
        use whole huge pages, so that none is split."""
        if not self._given:
            return
        self._given = False
        free, before = set(self._free), self.count
        while self.count - 1 in free:
            self.count -= 1
            free.remove(self.count)
        self._free, self._empty = sorted(free), self._empty & free
        first, last = (-(-n * self.stride // HUGE) * HUGE for n in (self.count, before))
        release(Pages(self.address + first, last - first))
        for begin, end in _runs(self._free):
            first, last = -(-begin * self.stride // HUGE) * HUGE, end * self.stride // HUGE * HUGE
            if last > first:
                release(Pages(self.address + first, last - first))
                self._empty.update(range(-(-first // self.stride), last // self.stride))

    def give_back(self) -> None:
        """Returns the memory of all free slots to the kernel. A huge page that is part of two slots
        is split by that, so it is for a system that is short of memory."""
        self.shrink()
        for slot in self._free:
            release(self.pages(slot))
        self._empty = set(self._free)

    def pages(self, slot: int) -> Pages:
        return Pages(self.address + slot * self.stride, self.stride)

    def target(self, place: Place, expert: int, slot: int) -> Target:
        """Where the bytes of `expert` go if they are read into `slot`."""
        start = place.offset + expert * place.stride
        end, offset = start + place.nbytes, floor_block(start)
        at = slot * self.stride + place.start
        view = self._memory[at : at + ceil_block(end) - offset]
        return Target(offset, view, end - offset, start - offset - place.phase)


class Slots:
    """The addresses of all slots, which `share_out` divides into pools.

    Attributes:
        places: layer → the places of its tensors in a slot.
        range: the addresses. A tensor whose data lie in there is read by slot.
        poison: a slot cannot be accessed before `provide` or after `forbid`, so that a missing wait
            is a crash and not a wrong token (for tests).
    """

    def __init__(self, tensors: Sequence[ExpertTensor], *, poison: bool = False) -> None:
        self.poison = poison
        by_layer: dict[int, list[ExpertTensor]] = {}
        for tensor in tensors:
            by_layer.setdefault(tensor.layer, []).append(tensor)
        self.places: dict[int, list[Place]] = {n: _places(of) for n, of in by_layer.items()}
        self._experts = {layer: max(t.n_expert for t in of) for layer, of in by_layer.items()}
        self._stride = _strides(self.places)
        sizes = (self._nbytes([layer]) for layer in by_layer)
        self._memory = Reservation(sum(sizes), huge=True)
        self.range = self._memory.range
        if poison:
            protect(self.range, accessible=False)

    def share_out(self, parts: Sequence[Sequence[int]]) -> list[Pool]:
        """Empty pools, one for the layers of each part, with room for all of their experts.

        Every earlier pool is void, and its memory given back. No read may be in flight.
        """
        self.clear()
        pools, at = [], 0
        for layers in parts:
            end = at + self._nbytes(layers)
            view = self._memory.view[at:end]
            pools.append(Pool(view, self.range.address + at, self._stride[layers[0]]))
            at = end
        return pools

    def clear(self) -> None:
        """Forgets the bytes of all slots, whatever state a fault left. No read may be in flight."""
        if self.poison:
            protect(self.range, accessible=False)
        release(self.range)

    def close(self) -> None:
        """Gives all memory back. No read may be in flight, and nothing may compute any more."""
        self._memory.close()

    def provide(self, blocks: memoryview) -> None:
        """The blocks are about to be read. Called by lanes."""
        if self.poison:
            protect(Pages.of(blocks), accessible=True)

    def forbid(self, slot: Pages) -> None:
        """The expert in a slot was evicted; only called with `poison`."""
        protect(slot, accessible=False)

    def expose(self) -> None:
        """Makes everything accessible: a faulted graph may still run a product before it stops."""
        if self.poison:
            protect(self.range, accessible=True)

    def _nbytes(self, layers: Sequence[int]) -> int:
        """Room for all experts of layers of one size, in whole huge pages."""
        needed = sum(self._experts[layer] * self._stride[layer] for layer in layers)
        return -(-needed // HUGE) * HUGE


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first of each run of consecutive ascending numbers, and the one behind its last."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1] + 1


def _places(tensors: Sequence[ExpertTensor]) -> list[Place]:
    places, at = [], 0
    for piece in pieces(tensors):
        first = piece[0]
        shard, start, end = range_of(piece, 0)
        places.append(
            Place(
                tensors=piece,
                projections="+".join(tensor.projection for tensor in piece),
                layer=first.layer,
                shard=shard,
                offset=start,
                stride=first.stride,
                nbytes=end - start,
                start=at,
                phase=start % BLOCK if first.stride % BLOCK == 0 else 0,
            )
        )
        at += _room(end - start)
    return places


def _room(nbytes: int) -> int:
    """Bytes of the whole blocks around so many, wherever in a block they begin."""
    return ceil_block(nbytes) + BLOCK


def _strides(places: Mapping[int, Sequence[Place]]) -> dict[int, int]:
    """Bytes of a slot by layer: equal for layers whose experts are equally large, although blocks
    may cut their projections differently."""
    largest: dict[int, int] = {}
    size = {layer: sum(place.nbytes for place in of) for layer, of in places.items()}
    for layer, of in places.items():
        room = sum(_room(place.nbytes) for place in of)
        largest[size[layer]] = max(room, largest.get(size[layer], 0))
    return {layer: largest[nbytes] for layer, nbytes in size.items()}
