"""Which experts are resident: a least-recently-used cache over (layer, expert), in bytes.

Bookkeeping alone: it moves no byte and knows no address, so it can be driven by a recorded trace
and compared with a reference.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What one lookup decided: experts to read, and (layer, expert) keys whose pages are free."""

    misses: list[int] = field(default_factory=list)
    victims: list[tuple[int, int]] = field(default_factory=list)


class ExpertCache:
    """A least-recently-used cache of `budget` bytes.

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
        budget: bytes, without that excess and without what was admitted early.
        used: bytes of all entries now.
        hits, misses, evictions, rereads: totals; a re-read is a miss of what was read before.
    """

    def __init__(self, budget: int, bytes_by_layer: dict[int, int]) -> None:
        self.budget = budget
        self.used = 0
        self.hits = self.misses = self.evictions = self.rereads = 0
        self._bytes = bytes_by_layer
        self._entries: OrderedDict[tuple[int, int], None] = OrderedDict()  # oldest first
        self._read_before: set[tuple[int, int]] = set()
        self._batch: tuple[int, Collection[int]] = (-1, ())  # what computes now
        self._early: dict[int, dict[int, bool]] = {}  # layer → expert → whether it was absent
        self._beside = 0  # bytes of early entries whose layer has not looked them up

    def would_hit(self, layer: int, expert: int) -> bool:
        """Whether the expert is cached and was not read early for the batch that asks."""
        early = self._early.get(layer)
        return (layer, expert) in self._entries and not (early and early.get(expert))

    @property
    def protected(self) -> int:
        """Number of experts that are protected, because they were admitted early or found then."""
        return sum(len(experts) for experts in self._early.values())

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, layer: int, experts: Iterable[int]) -> Outcome:
        """Marks a batch of distinct `experts` of `layer` as used and admits those that are absent.

        Returns the misses, in the order given, and the victims evicted for them. Victims are never
        part of the batch, and nothing still computes with them, because the graph runs a layer only
        after everything before it.
        """
        outcome = Outcome()
        self._early.pop(self._batch[0], None)
        self._batch = (layer, ())
        self._evict(outcome.victims, keep=0)
        entries, early, counted = self._entries, self._early.get(layer), 0
        batch = list(experts)
        if early:
            self._beside -= self._bytes[layer] * sum(early.values())
        for expert in batch:
            key = (layer, expert)
            if key in entries:
                entries.move_to_end(key)
                counted += bool(early and early.get(expert))
            else:
                self._admit(key, outcome.misses)
        self.hits += len(batch) - len(outcome.misses) - counted
        self._batch = (layer, batch)
        self._evict(outcome.victims, keep=len(batch))
        return outcome

    def admit_early(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Protects the distinct `experts` of a later `layer` and admits those that are absent.

        Returns the latter, in the order given.
        """
        misses: list[int] = []
        early = self._early[layer] = dict.fromkeys(experts, False)
        for expert in early:
            if (layer, expert) not in self._entries:
                early[expert] = True
                self._admit((layer, expert), misses)
        self._beside += self._bytes[layer] * len(misses)
        return misses

    def protect(self, layer: int, experts: Iterable[int]) -> None:
        """Keeps the cached ones of a later layer's `experts` until the batch after its own."""
        here = {expert: False for expert in experts if (layer, expert) in self._entries}
        if here:
            self._early[layer] = here

    def _admit(self, key: tuple[int, int], misses: list[int]) -> None:
        self._entries[key] = None
        misses.append(key[1])
        self.used += self._bytes[key[0]]
        self.misses += 1
        if key in self._read_before:
            self.rereads += 1
        else:
            self._read_before.add(key)

    def _evict(self, victims: list[tuple[int, int]], *, keep: int) -> None:
        """Evicts the oldest entries until the budget holds; the `keep` youngest are the batch's."""
        while self.used - self._beside > self.budget and len(self._entries) > keep:
            if self._early:
                key = self._oldest_free()
                if key is None:
                    return
                del self._entries[key]
            else:
                key, _ = self._entries.popitem(last=False)
            self.used -= self._bytes[key[0]]
            self.evictions += 1
            victims.append(key)

    def _oldest_free(self) -> tuple[int, int] | None:
        """The oldest entry that is neither protected nor part of the batch."""
        layer, batch = self._batch
        for key in self._entries:
            at, expert = key
            if expert not in self._early.get(at, ()) and not (at == layer and expert in batch):
                return key
        return None

    def shrink(self) -> list[tuple[int, int]]:
        """Between two batches: evicts what is more than the budget; returns the victims."""
        victims: list[tuple[int, int]] = []
        self._batch = (-1, ())
        self._evict(victims, keep=0)
        return victims

    def release(self) -> None:
        """Ends every protection."""
        self._early.clear()
        self._beside = 0

    def clear(self) -> None:
        """Forgets every entry and every protection; totals stay."""
        self._entries.clear()
        self.release()
        self._batch = (-1, ())
        self.used = 0
