"""Which experts are resident: a least-recently-used cache over (layer, expert), in bytes.

Bookkeeping alone: it moves no byte and knows no address, so it can be driven by a recorded trace
and compared with a reference.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Outcome:
    """What one lookup decided: experts to read, and (layer, expert) keys whose pages are free."""

    misses: list[int] = field(default_factory=list)
    victims: list[tuple[int, int]] = field(default_factory=list)


PART_SLOTS = 1024
"""Experts of a part, about. A product over experts takes 6 ns for each slot that its layer's pool
has, used or not: here, 1 % of a token."""


@dataclass
class _Part:
    """Layers that share a part of the budget.

    Attributes:
        beside: bytes of early entries whose layer has not looked them up.
    """

    layers: Sequence[int]
    budget: int
    entries: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)
    used: int = 0
    beside: int = 0


class ExpertCache:
    """A least-recently-used cache of `budget` bytes.

    The budget is divided once and for all, in proportion to their bytes, between *parts*: layers
    whose experts are equally large, at most about `PART_SLOTS` experts together, so that a part's
    experts can share slots of one size. Within a part the least recently used goes first, whichever
    layer it is of.

    One *batch* is what a layer needs at one moment: a token's top-k, or the union over a prompt's
    rows. Its experts stay until the next batch even if they exceed the budget, because the layer
    is about to compute with them; `lookup` of the next batch first evicts the excess.

    Experts *admitted early*, for a layer that comes later, do not count against the budget until
    that layer looks them up, so that nothing is evicted for them before it would be if they were
    read on demand. Otherwise a token's first layers, which nothing predicts, would lose their
    experts to later ones. They, and what was resident already, are protected until the batch after
    their layer's. They count as misses when they are admitted, and not as hits when they are used.

    Owned by the evaluation thread; no other thread may touch it.

    Attributes:
        budget: bytes, without that excess and without what was admitted early. Setting it divides
            it anew, and empties the cache; `resize` does neither.
        hits, misses, evictions, rereads: totals; a re-read is a miss of what was read before.
    """

    def __init__(self, budget: int, bytes_by_layer: dict[int, int]) -> None:
        self.hits = self.misses = self.evictions = self.rereads = 0
        self._bytes = bytes_by_layer
        self._read_before: set[tuple[int, int]] = set()
        self._batch: tuple[int, Collection[int]] = (-1, ())  # what computes now
        self._early: dict[int, dict[int, bool]] = {}  # layer → expert → whether it was absent
        self._parts: dict[int, _Part] = {}  # by layer
        self.budget = budget

    @property
    def budget(self) -> int:
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget
        self._early.clear()
        self._batch = (-1, ())
        total = sum(self._bytes.values())
        for layers in self._divide(budget):
            share = budget * sum(self._bytes[layer] for layer in layers) // total
            self._parts.update(dict.fromkeys(layers, _Part(layers, share)))

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

    def resize(self, budget: int) -> list[tuple[int, int]]:
        """Between two batches: another budget, divided as before; returns the victims."""
        parts, old = self._distinct(), sum(part.budget for part in self._distinct())
        victims: list[tuple[int, int]] = []
        self._budget, self._batch = budget, (-1, ())
        for part in parts:
            part.budget = budget * part.budget // old if old else budget // len(parts)
            self._evict(part, victims, keep=0)
        return victims

    def would_hit(self, layer: int, expert: int) -> bool:
        """Whether the expert is cached and was not read early for the batch that asks."""
        early = self._early.get(layer)
        return (layer, expert) in self and not (early and early.get(expert))

    @property
    def protected(self) -> int:
        """Number of experts that are protected, because they were admitted early or found then."""
        return sum(len(experts) for experts in self._early.values())

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._parts[key[0]].entries

    def __len__(self) -> int:
        return sum(len(part.entries) for part in self._distinct())

    def lookup(self, layer: int, experts: Iterable[int]) -> Outcome:
        """Marks a batch of distinct `experts` of `layer` as used and admits those that are absent.

        Returns the misses, in the order given, and the victims evicted for them. Victims are never
        part of the batch, and nothing still computes with them, because the graph runs a layer only
        after everything before it.
        """
        outcome, part = Outcome(), self._parts[layer]
        previous = self._parts.get(self._batch[0], part)
        self._early.pop(self._batch[0], None)
        self._batch = (layer, ())
        if previous is not part:
            self._evict(previous, outcome.victims, keep=0)
        self._evict(part, outcome.victims, keep=0)
        entries, early, counted = part.entries, self._early.get(layer), 0
        batch = list(experts)
        if early:
            part.beside -= self._bytes[layer] * sum(early.values())
        for expert in batch:
            key = (layer, expert)
            if key in entries:
                entries.move_to_end(key)
                counted += bool(early and early.get(expert))
            else:
                self._admit(part, key, outcome.misses)
        self.hits += len(batch) - len(outcome.misses) - counted
        self._batch = (layer, batch)
        self._evict(part, outcome.victims, keep=len(batch))
        return outcome

    def admit_early(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Protects the distinct `experts` of a later `layer` and admits those that are absent.

        Returns the latter, in the order given.
        """
        misses: list[int] = []
        part, early = self._parts[layer], dict.fromkeys(experts, False)
        self._early[layer] = early
        for expert in early:
            if (layer, expert) not in part.entries:
                early[expert] = True
                self._admit(part, (layer, expert), misses)
        part.beside += self._bytes[layer] * len(misses)
        return misses

    def protect(self, layer: int, experts: Iterable[int]) -> None:
        """Keeps the cached ones of a later layer's `experts` until the batch after its own."""
        here = {expert: False for expert in experts if (layer, expert) in self}
        if here:
            self._early[layer] = here

    def _admit(self, part: _Part, key: tuple[int, int], misses: list[int]) -> None:
        part.entries[key] = None
        misses.append(key[1])
        part.used += self._bytes[key[0]]
        self.misses += 1
        if key in self._read_before:
            self.rereads += 1
        else:
            self._read_before.add(key)

    def _evict(self, part: _Part, victims: list[tuple[int, int]], *, keep: int) -> None:
        """Evicts the oldest entries until the budget holds; the `keep` youngest are the batch's."""
        while part.used - part.beside > part.budget and len(part.entries) > keep:
            if self._early:
                key = self._oldest_free(part)
                if key is None:
                    return
                del part.entries[key]
            else:
                key, _ = part.entries.popitem(last=False)
            part.used -= self._bytes[key[0]]
            self.evictions += 1
            victims.append(key)

    def _oldest_free(self, part: _Part) -> tuple[int, int] | None:
        """The oldest entry that is neither protected nor part of the batch."""
        layer, batch = self._batch
        for key in part.entries:
            at, expert = key
            if expert not in self._early.get(at, ()) and not (at == layer and expert in batch):
                return key
        return None

    def release(self) -> None:
        """Ends every protection."""
        self._early.clear()
        for part in self._distinct():
            part.beside = 0

    def clear(self) -> None:
        """Forgets every entry and every protection; totals stay."""
        self.budget = self._budget
