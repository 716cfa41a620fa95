"""Which experts are resident: a least-recently-used cache over (layer, expert), in bytes.

Pure bookkeeping. It moves no byte and knows no address, so it can be replayed over a recorded
trace and compared with a reference.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What one lookup decided: experts to read and (layer, expert) keys whose bytes may go."""

    misses: list[int] = field(default_factory=list)
    victims: list[tuple[int, int]] = field(default_factory=list)


class ExpertCache:
    """LRU within `budget` bytes.

    One *batch* is what a layer needs at one moment: a token's top-k, or the union over a prompt's
    rows. Its experts stay until the next batch even where they exceed the budget, because the
    layer is about to compute with them; `lookup` of the next batch first trims what was over.

    Owned by the evaluation thread; no other thread may touch it.

    Attributes:
        budget: bytes, excluding that excess.
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

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, layer: int, experts: Iterable[int]) -> Outcome:
        """Marks a batch of distinct `experts` of `layer` as used and admits those that are absent.

        Returns the misses, in the order given, and the victims that make room for them. Victims
        are never part of the batch, and nothing still computes with them: the graph runs a layer
        only after everything before it.
        """
        outcome = Outcome()
        self._evict(outcome.victims, keep=0)
        entries, size, batch = self._entries, self._bytes[layer], 0
        for expert in experts:
            key = (layer, expert)
            batch += 1
            if key in entries:
                entries.move_to_end(key)
            else:
                entries[key] = None
                outcome.misses.append(expert)
                if key in self._read_before:
                    self.rereads += 1
                else:
                    self._read_before.add(key)
        self.used += size * len(outcome.misses)
        self.misses += len(outcome.misses)
        self.hits += batch - len(outcome.misses)
        self._evict(outcome.victims, keep=batch)
        return outcome

    def _evict(self, victims: list[tuple[int, int]], *, keep: int) -> None:
        """Drops the oldest entries until the budget holds; the `keep` youngest are the batch's."""
        while self.used > self.budget and len(self._entries) > keep:
            key, _ = self._entries.popitem(last=False)
            self.used -= self._bytes[key[0]]
            self.evictions += 1
            victims.append(key)

    def clear(self) -> None:
        """Forgets every entry; totals stay."""
        self._entries.clear()
        self.used = 0
