"""Which slot each expert has, and where products over experts find the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routeahead.experts.layout import ModelLayout
from routeahead.experts.load import Load
from routeahead.experts.reads import Kind, Read, Ticket
from routeahead.experts.slots import Place, Pool, Slots
from routeahead.types import Ids

Bind = Callable[[str, int, int, int], None]
"""(expert tensor's name, address of its slice in slot 0, bytes from one slot to the next, number of
slots): where products find it from now on."""

_BOUND_STEP = 64  # slots by which tensors grow: each time, all of a pool's are told


@dataclass
class LayerSlots:
    """Where one layer's experts are.

    Attributes:
        places: of its tensors, in the order in which they are read.
        slots: of each expert; -1 if it has none.
        cells: the same memory, which is quicker than NumPy for one expert.
    """

    places: list[Place]
    pool: Pool
    slots: Ids
    cells: memoryview


class SlotTable:
    """The slots of all layers' experts.

    Owned by the evaluation thread.

    Attributes:
        layers: by number.
        pools: each with the layers that share it.
        bound: layer → slots that its tensors were told of.
        settled: see `ExpertSource.settled`.
    """

    settled: npt.NDArray[np.bool_] | None = None

    def __init__(
        self, layout: ModelLayout, slots: Slots, bind: Bind, *, most: Callable[[], int]
    ) -> None:
        """Of no layer, until `lay_out`. If the pools hold more bytes than `most` returns, one that
        grows makes the others give memory back."""
        self._layout, self._slots, self._bind, self._most = layout, slots, bind, most
        self._order: dict[str, int] = {}
        self.layers: dict[int, LayerSlots] = {}
        self.pools: list[tuple[Pool, Sequence[int]]] = []
        self.bound: dict[int, int] = {}

    def lay_out(self, parts: Sequence[Sequence[int]], *, whole: bool) -> None:
        """Makes the pools, empty. No read may be in flight.

        Args:
            parts: the layers that share a pool.
            whole: each layer has a pool of its own, and each expert the slot of its own number.
        """
        layers = self._layout.moe_layers
        size = (max(layers) + 1, self._layout.n_expert)
        self.settled = np.ones(size, np.bool_) if whole else None  # of layers without experts too
        parts = [[layer] for layer in layers] if whole else parts
        self.pools = list(zip(self._slots.share_out(parts), parts, strict=True))
        experts = {tensor.layer: tensor.n_expert for tensor in self._layout.experts}
        for pool, of in self.pools:
            for layer in of:
                places = self._slots.places[layer]
                self._sort(places)
                if self.settled is not None:
                    self.settled[layer, : experts[layer]] = False
                slots = np.full(experts[layer], -1, np.int32)
                self.layers[layer] = LayerSlots(places, pool, slots, slots.data)
            self._bind_slots(pool, 0)

    def order(self, projections: Sequence[str]) -> None:
        """Experts are read in the order in which the graph computes the projections."""
        self._order = {projection: place for place, projection in enumerate(projections)}
        for layer in self.layers.values():
            self._sort(layer.places)

    def rank(self, place: Place) -> int:
        """Where the first projection that a read brings stands in that order."""
        return min(self._order.get(tensor.projection, 99) for tensor in place.tensors)

    def _sort(self, places: list[Place]) -> None:
        places.sort(key=self.rank)

    def slot(self, layer: int, expert: int) -> int:
        """Where an expert is to be read into. One that was guessed has a slot already."""
        of = self.layers[layer]
        slot: int = of.cells[expert]
        if slot < 0:
            if self.settled is not None:
                slot = expert
            else:
                before, slot = of.pool.held, of.pool.take()
                if of.pool.held > before:
                    self._grew(layer, of.pool)
            of.cells[expert] = slot
        return slot

    def slots(self, layer: int, experts: Ids) -> Ids:
        """The slots of experts that have one."""
        found: Ids = self.layers[layer].slots[experts]
        return found

    def load(self, layer: int, experts: Sequence[int], kind: Kind) -> tuple[Load, list[Read]]:
        """All of some experts: reads of one place after the other, each with a ticket, which is
        that of all projections in it."""
        load, reads = Load(layer, experts), list[Read]()
        if not experts:
            return load, reads
        of = self.layers[layer]
        slots = [(expert, self.slot(layer, expert)) for expert in experts]
        for place in of.places:
            ticket = Ticket(len(experts))
            for tensor in place.tensors:
                load.tickets[tensor.projection] = ticket
            for expert, slot in slots:
                reads.append(Read(place, expert, of.pool, slot, ticket, kind))
        return load, reads

    def reads(self, layer: int, expert: int, kind: Kind) -> list[Read]:
        """All of an expert, each read with a ticket of its own."""
        of, slot = self.layers[layer], self.slot(layer, expert)
        return [Read(place, expert, of.pool, slot, Ticket(1), kind) for place in of.places]

    def give(self, victims: Sequence[tuple[int, int]]) -> None:
        """Frees the slots of (layer, expert) keys, of which no read may be in flight."""
        for layer, expert in victims:
            of = self.layers[layer]
            slot: int = of.cells[expert]
            of.cells[expert] = -1
            if self._slots.poison:
                self._slots.forbid(of.pool.pages(slot))
            if self.settled is None:
                of.pool.give(slot)

    def give_back(self) -> None:
        """Returns the memory of all free slots to the kernel."""
        for pool, _ in self.pools:
            pool.give_back()

    @property
    def held(self) -> int:
        """Bytes of memory that slots have, in use or free. May be called on any thread."""
        return sum(pool.held for pool, _ in self.pools)

    def clear(self) -> None:
        self.layers.clear()
        self.pools.clear()

    def _grew(self, layer: int, pool: Pool) -> None:
        self._make_room(pool)
        if pool.count > self.bound[layer]:
            self._bind_slots(pool, pool.count + _BOUND_STEP)

    def _make_room(self, pool: Pool) -> None:
        """If a prompt makes a pool grow beyond its part of the cache, the others give back what
        an earlier layer of it made them take."""
        if self.held > self._most():
            for one, _ in self.pools:
                if one is not pool:
                    one.shrink()

    def _bind_slots(self, pool: Pool, count: int) -> None:
        """Tells the tensors of a pool's layers where their slices are."""
        for layer in next(layers for one, layers in self.pools if one is pool):
            of = self.layers[layer]
            # A product that runs after a fault still has the experts' numbers.
            self.bound[layer] = bound = max(count, len(of.slots))
            for place in of.places:
                first = pool.address + place.start + place.phase - place.offset
                for tensor in place.tensors:
                    self._bind(tensor.name, first + tensor.offset, pool.stride, bound)
