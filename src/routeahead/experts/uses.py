"""How often each expert was used, in this run and in those before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from routeahead.experts.eviction import Key


class Uses:
    """Counts by layer and expert. Owned by the evaluation thread.

    Attributes:
        counts: layer → uses of each expert since the load; a batch of several rows counts once.
    """

    def __init__(
        self, experts: Mapping[int, int], before: Mapping[int, Sequence[float]] | None = None
    ) -> None:
        """
        Makes counts of 0.

        Args:
            experts: how many each layer has.
            before: the same counts of earlier runs.
        """
        self.counts = {layer: [0] * count for layer, count in experts.items()}
        self._before = before or {layer: [0.0] * count for layer, count in experts.items()}

    def add(self, layer: int, experts: Iterable[int]) -> None:
        counts = self.counts[layer]
        for expert in experts:
            counts[expert] += 1

    def __bool__(self) -> bool:
        """Whether anything was used since the load."""
        return any(map(any, self.counts.values()))

    def merged(self) -> dict[int, list[float]]:
        """This run's counts with half of what was known before: what is old fades."""
        return {
            layer: [
                count + before / 2
                for count, before in zip(counts, self._before[layer], strict=True)
            ]
            for layer, counts in self.counts.items()
        }

    def likeliest(self) -> list[Key]:
        """All (layer, expert) keys, the most used first; equals layer by layer."""
        merged = self.merged()
        keys = [
            (layer, expert) for layer, counts in merged.items() for expert in range(len(counts))
        ]
        return sorted(keys, key=lambda key: -merged[key[0]][key[1]])
