"""Which entries of the expert cache go first.

An `Eviction` keeps the entries of one part of the cache in order. It knows layers, experts and
their bytes; budgets, protections and counts are the cache's (`experts.cache`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from routeahead.types import CachePolicy, Ids

Key = tuple[int, int]
"""(layer, expert)"""
Held = Mapping[int, Collection[int]]
"""Layer → experts that must stay."""


class Eviction(Protocol):
    """The entries of some layers, and which of them go first."""

    def use(self, layer: int, experts: Sequence[int], rows: Ids | None) -> list[int]:
        """The layer's batch uses distinct `experts`: returns those that were absent, in order, and
        has them from now on.

        Args:
            rows: int32 (rows, top-k), what each row of the batch uses; None if it has one row.
        """
        ...

    def admit(self, layer: int, expert: int, *, needed: bool = True) -> None:
        """The expert, which was absent, is here before its layer has asked for it.

        Args:
            needed: its layer will certainly ask.
        """
        ...

    def evict(self, excess: int, held: Held, *, keep: bool) -> list[Key]:
        """Removes entries until `excess` bytes are free or none is left that may go; returns them.

        Args:
            keep: what the latest `use` was for stays.
        """
        ...

    def __contains__(self, key: Key) -> bool: ...

    def __len__(self) -> int: ...


MakeEviction = Callable[[Mapping[int, int]], Eviction]
"""An empty one for layers whose experts have so many bytes."""


class LRU:
    """The least recently used goes first, whichever layer it is of."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._sizes = sizes
        self._entries: OrderedDict[Key, None] = OrderedDict()  # oldest first
        self._batch: tuple[int, Sequence[int]] = (-1, ())  # its entries are the youngest

    def use(self, layer: int, experts: Sequence[int], rows: Ids | None) -> list[int]:
        entries, absent = self._entries, list[int]()
        for expert in experts:
            key = (layer, expert)
            if key in entries:
                entries.move_to_end(key)
            else:
                entries[key] = None
                absent.append(expert)
        self._batch = (layer, experts)
        return absent

    def admit(self, layer: int, expert: int, *, needed: bool = True) -> None:
        self._entries[layer, expert] = None
        if not needed:  # older than whatever was used
            self._entries.move_to_end((layer, expert), last=False)

    def evict(self, excess: int, held: Held, *, keep: bool) -> list[Key]:
        layer, batch = self._batch if keep else (-1, ())
        entries, gone = self._entries, list[Key]()
        while excess > 0 and len(entries) > len(batch):
            key: Key | None
            if held:
                key = self._oldest_free(held, layer, batch)
                if key is None:
                    break
                del entries[key]
            else:
                key, _ = entries.popitem(last=False)
            excess -= self._sizes[key[0]]
            gone.append(key)
        return gone

    def _oldest_free(self, held: Held, layer: int, batch: Sequence[int]) -> Key | None:
        for key in self._entries:
            at, expert = key
            if expert not in held.get(at, ()) and not (at == layer and expert in batch):
                return key
        return None

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


def eviction(policy: CachePolicy, n_expert: int) -> MakeEviction:
    """What makes the evictions of a policy's name, for layers of at most `n_expert` experts."""
    if policy == "lru":
        return LRU
    from routeahead.experts.decay import Decay  # numba, which LRU does without

    return lambda sizes: Decay(sizes, n_expert)
