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


class Eviction(Protocol):
    """The entries of some layers, and which of them go first."""

    def use(
        self, layer: int, experts: Sequence[int], rows: Ids | None, room: int, spare: int = 0
    ) -> tuple[list[int], list[Key]]:
        """The layer's batch uses distinct `experts`, which it has from now on.

        Entries that are neither held nor of this batch are then removed, until what was absent,
        apart from `spare` bytes of it, has `room` bytes or none of them is left.

        Args:
            rows: int32 (rows, top-k), what each row of the batch uses; None if it has one row.
            room: bytes that are free before; negative if the budget is exceeded.
            spare: bytes that may stand beside the budget.

        Returns the experts that were absent, in order, and the keys of what was removed.
        """
        ...

    def admit(self, layer: int, experts: Collection[int]) -> list[int]:
        """Distinct `experts`, for which a layer of which none is held is certain to ask, are here
        and stay until `let_go`.

        Returns those that were absent, in order.
        """
        ...

    def fill(self, layer: int, expert: int) -> None:
        """An absent expert is here, for which nobody has asked."""
        ...

    def hold(self, layer: int, experts: Collection[int]) -> None:
        """These entries of a layer of which none is held stay until `let_go`."""
        ...

    def let_go(self, layer: int, experts: Collection[int]) -> None:
        """They may go again."""
        ...

    def evict(self, excess: int) -> list[Key]:
        """The batch is over: removes entries that are not held until `excess` bytes are free or
        none is left; returns their keys."""
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
        self._held: dict[int, Collection[int]] = {}  # by layer

    def use(
        self, layer: int, experts: Sequence[int], rows: Ids | None, room: int, spare: int = 0
    ) -> tuple[list[int], list[Key]]:
        entries, absent = self._entries, list[int]()
        for expert in experts:
            key = (layer, expert)
            if key in entries:
                entries.move_to_end(key)
            else:
                entries[key] = None
                absent.append(expert)
        excess = max(0, self._sizes[layer] * len(absent) - spare) - room
        return absent, self._remove(excess, layer, experts) if excess > 0 else []

    def admit(self, layer: int, experts: Collection[int]) -> list[int]:
        entries = self._entries
        absent = [expert for expert in experts if (layer, expert) not in entries]
        for expert in absent:
            entries[layer, expert] = None
        self._held[layer] = experts
        return absent

    def fill(self, layer: int, expert: int) -> None:
        self._entries[layer, expert] = None
        self._entries.move_to_end((layer, expert), last=False)  # older than whatever was used

    def hold(self, layer: int, experts: Collection[int]) -> None:
        self._held[layer] = experts

    def let_go(self, layer: int, experts: Collection[int]) -> None:
        del self._held[layer]

    def evict(self, excess: int) -> list[Key]:
        return self._remove(excess, -1, ())

    def _remove(self, excess: int, layer: int, batch: Sequence[int]) -> list[Key]:
        """Removes the oldest until `excess` bytes are free, but not the layer's `batch`, which has
        the youngest entries."""
        entries, gone = self._entries, list[Key]()
        while excess > 0 and len(entries) > len(batch):
            key: Key | None
            if self._held:
                key = self._oldest_free(layer, batch)
                if key is None:
                    break
                del entries[key]
            else:
                key, _ = entries.popitem(last=False)
            excess -= self._sizes[key[0]]
            gone.append(key)
        return gone

    def _oldest_free(self, layer: int, batch: Sequence[int]) -> Key | None:
        held = self._held
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
