"""Which experts are resident: a cache over (layer, expert), in bytes.

Bookkeeping alone: it moves no byte and knows no address, so it can be driven by a recorded trace
and compared with a reference. What goes first is `experts.eviction`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from routeahead.experts.eviction import LRU, Eviction, Key, MakeEviction
from routeahead.types import Ids


@dataclass
class Outcome:
    """What one lookup decided: experts to read, and (layer, expert) keys whose pages are free."""

    misses: list[int] = field(default_factory=list)
    victims: list[Key] = field(default_factory=list)


PART_SLOTS = 1024
"""Experts of a part, about. A product over experts takes 6 ns for each slot that its layer's pool
has, used or not: here, 1 % of a token."""

_NO_LIMIT = 1 << 62


@dataclass
class _Part:
    """Layers that share a part of the budget.

    Attributes:
        beside: bytes of early entries whose layer has not looked them up.
    """

    layers: Sequence[int]
    budget: int
    entries: Eviction
    used: int = 0
    beside: int = 0


class ExpertCache:
    """A cache of `budget` bytes.

    The budget is divided once and for all, in proportion to their bytes, between *parts*: layers
    whose experts are equally large, at most about `PART_SLOTS` experts together, so that a part's
    experts can share slots of one size. Each part has an eviction of its own.

    One *batch* is what a layer needs at one moment: a token's top-k, or the union over the rows of
    a prompt or of guesses to verify. Its experts stay until the next batch even if they exceed the
    budget, because the layer is about to compute with them; the next `lookup` evicts the excess.

    What a batch of several rows was missing stands beside the budget until then, as far as `spare`
    allows, so that nothing is evicted for what the next lookup may find to be the first to go: of
    the layers of a prompt, which come round once in each of its ubatches, that is the latest. This
    holds for few rows, too (guesses to verify), where it was measured to save reads. For one row
    nothing is ever beside: what a token has just used is seldom what goes first.

    Experts *admitted early*, for a layer that comes later, do not count against the budget until
    that layer looks them up, so that nothing is evicted for them before it would be if they were
    read on demand. Otherwise a token's first layers, which nothing predicts, would lose their
    experts to later ones. They, and what was resident already, are protected until the batch after
    their layer's. They count as misses when they are admitted, and not as hits when they are used.

    Owned by who has the cache (`engine.ownership`); no other thread may touch it.

    Attributes:
        budget: bytes, without that excess and without what was admitted early. Setting it divides
            it anew, and empties the cache; `resize` does neither.
        spare: bytes of one batch that may stand beside it; all of them, unless it is set.
        emptied: how often that happened.
        hits, misses, evictions, rereads: totals; a re-read is a miss of what was read before.
    """

    def __init__(
        self, budget: int, bytes_by_layer: Mapping[int, int], make_eviction: MakeEviction = LRU
    ) -> None:
        self.hits = self.misses = self.evictions = self.rereads = self.emptied = 0
        self._bytes, self._make_eviction = bytes_by_layer, make_eviction
        self.spare = _NO_LIMIT
        self._read_before: dict[int, set[int]] = {layer: set() for layer in bytes_by_layer}
        self._batch_layer = -1  # the layer that computes now
        self._early: dict[int, dict[int, bool]] = {}  # layer → expert → whether it was absent
        self._parts: dict[int, _Part] = {}  # by layer
        self.budget = budget

    @property
    def budget(self) -> int:
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget
        self.emptied += 1
        self._early.clear()
        self._batch_layer = -1
        total = sum(self._bytes.values())
        for layers in self._divide(budget):
            share = budget * sum(self._bytes[layer] for layer in layers) // total
            entries = self._make_eviction({layer: self._bytes[layer] for layer in layers})
            self._parts.update(dict.fromkeys(layers, _Part(layers, share, entries)))

    def _divide(self, budget: int) -> list[list[int]]:
        total, by_size = sum(self._bytes.values()), dict[int, list[int]]()
        for layer, nbytes in self._bytes.items():
            by_size.setdefault(nbytes, []).append(layer)
        parts: list[list[int]] = []
        for layers in by_size.values():
            experts = budget * len(layers) // total
            count = min(len(layers), max(1, -(-experts // PART_SLOTS)))
            cuts = [len(layers) * i // count for i in range(count + 1)]
            parts += [layers[a:b] for a, b in pairwise(cuts)]
        return parts

    @property
    def parts(self) -> list[Sequence[int]]:
        """The layers of each part."""
        return [part.layers for part in self._distinct()]

    def _distinct(self) -> list[_Part]:
        return list({id(part): part for part in self._parts.values()}.values())

    @property
    def used(self) -> int:
        """Bytes of all entries now."""
        return sum(part.used for part in self._distinct())

    def resize(self, budget: int) -> list[Key]:
        """Between two batches: another budget, divided as before; returns the victims."""
        parts, old = self._distinct(), sum(part.budget for part in self._distinct())
        victims: list[Key] = []
        self._budget, self._batch_layer = budget, -1
        for part in parts:
            part.budget = budget * part.budget // old if old else budget // len(parts)
            self._evict(part, victims)
        return victims

    def would_hit(self, layer: int, expert: int) -> bool:
        """Whether the expert is cached and was not read early for the batch that asks."""
        early = self._early.get(layer)
        return (layer, expert) in self and not (early and early.get(expert))

    @property
    def protected(self) -> int:
        """Number of experts that are protected, because they were admitted early or found then."""
        return sum(len(experts) for experts in self._early.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._parts[key[0]].entries

    def __len__(self) -> int:
        return sum(len(part.entries) for part in self._distinct())

    def lookup(self, layer: int, experts: Sequence[int], rows: Ids | None = None) -> Outcome:
        """Marks a batch of distinct `experts` of `layer` as used and admits those that are absent.

        Returns the misses, in the order given, and the victims evicted for them and for what the
        batch before had in excess. None is of this batch, unless it has one row and the one before
        had an excess: then it is a miss, too. Nothing still computes with victims, because the
        graph runs a layer only after everything before it.

        Args:
            rows: int32 (rows, top-k), the experts of each row of the batch; None if it has one row.
        """
        if not experts and layer not in self._early:
            return Outcome()  # of a prompt's rows, the last layer may see none: that is no batch
        part, victims = self._parts[layer], list[Key]()
        last, self._batch_layer = self._batch_layer, -1
        previous = self._parts.get(last, part)
        if last in self._early:
            self._let_go(last)
        if previous is not part:
            self._evict(previous, victims)
        if rows is None:
            self._evict(part, victims)
        early, counted = self._early.get(layer), 0
        if early:
            part.beside -= self._bytes[layer] * sum(early.values())
            counted = len([expert for expert in experts if early.get(expert)])
        room = part.budget + part.beside - part.used
        spare = 0 if rows is None else self.spare
        misses, gone = part.entries.use(layer, experts, rows, room, spare)
        if misses:
            self._read(part, layer, misses)
        if gone:
            self._evicted(part, gone, victims)
        self.hits += len(experts) - len(misses) - counted
        self._batch_layer = layer
        return Outcome(misses, victims)

    def admit_early(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Protects the distinct `experts` of a later `layer` and admits those that are absent.

        Returns the latter, in the order given. Without a budget nothing can be kept, so nothing is
        admitted.
        """
        if not self._budget:
            return []
        part, early = self._parts[layer], dict.fromkeys(experts, False)
        if layer in self._early:
            early |= self._let_go(layer)  # stays: somebody else's reads for the same layer
        misses = part.entries.admit(layer, early)
        self._early[layer] = early
        if misses:
            early.update(dict.fromkeys(misses, True))
            self._read(part, layer, misses)
            part.beside += self._bytes[layer] * len(misses)
        return misses

    def room(self, layer: int) -> int:
        """How many experts more the layer's part has room for."""
        part = self._parts[layer]
        return max(0, part.budget + part.beside - part.used) // self._bytes[layer]

    def fill(self, layer: int, expert: int) -> bool:
        """Admits an expert that no layer has asked for, if it is absent and nothing has to be
        evicted for it; returns whether it was admitted. It counts neither as hit nor as miss."""
        part = self._parts[layer]
        if not self.room(layer) or (layer, expert) in part.entries:
            return False
        part.entries.fill(layer, expert)
        part.used += self._bytes[layer]
        return True

    def protect(self, layer: int, experts: Iterable[int]) -> None:
        """Keeps the cached ones of a later layer's `experts` until the batch after its own."""
        here = {expert: False for expert in experts if (layer, expert) in self}
        if not here:
            return
        if layer in self._early:
            here |= self._let_go(layer)
        self._early[layer] = here
        self._parts[layer].entries.hold(layer, here)

    def _let_go(self, layer: int) -> dict[int, bool]:
        early = self._early.pop(layer)
        self._parts[layer].entries.let_go(layer, early)
        return early

    def was_read(self, layer: int, expert: int) -> None:
        """The expert was read beside the cache, and is gone: reading it again is a re-read."""
        self._count_reads(layer, [expert])

    def _read(self, part: _Part, layer: int, misses: Sequence[int]) -> None:
        """Counts entries that were admitted because they are about to be read."""
        part.used += self._bytes[layer] * len(misses)
        self.misses += len(misses)
        self._count_reads(layer, misses)

    def _count_reads(self, layer: int, experts: Sequence[int]) -> None:
        before = self._read_before[layer]
        self.rereads += len(before.intersection(experts))
        before.update(experts)

    def _evict(self, part: _Part, victims: list[Key]) -> None:
        """Evicts until the budget holds, also what the latest batch used."""
        excess = part.used - part.beside - part.budget
        if excess > 0:
            self._evicted(part, part.entries.evict(excess), victims)

    def _evicted(self, part: _Part, gone: list[Key], victims: list[Key]) -> None:
        part.used -= sum([self._bytes[layer] for layer, _ in gone])
        self.evictions += len(gone)
        victims += gone

    def release(self) -> None:
        """Ends every protection."""
        for layer in list(self._early):
            self._let_go(layer)
        for part in self._distinct():
            part.beside = 0

    def clear(self) -> None:
        """Forgets every entry and every protection; totals stay."""
        self.budget = self._budget
