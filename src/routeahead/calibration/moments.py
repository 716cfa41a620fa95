"""Sums over a text's tokens from which the regression is solved: its sufficient statistics.

With x the hidden vector N MoE layers before a layer whose router says y, they are the *gram* matrix
sum(x x') of each source layer and the *cross* matrix sum(x y') of each layer and depth. They are
float64, because a sum over a million tokens in float32 has lost what a small penalty needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routeahead.routing.policy import HALF
from routeahead.types import Floats

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """The experts of layer `target` are predicted at layer `source`, `depth` MoE layers earlier.

    Where the depth is HALF, the source is half a layer before the target, too: what its attention
    is given.
    """

    source: float
    target: int
    depth: float


def pairs_of(layers: Sequence[int], depths: Sequence[float], targets: Sequence[int]) -> list[Pair]:
    """All pairs for these targets; `layers` are the numbers of the MoE layers, in order."""
    return [
        Pair(layer - HALF if depth == HALF else layers[index - int(depth)], layer, depth)
        for index, layer in enumerate(layers)
        for depth in depths
        if layer in targets and index >= int(depth)
    ]


class Moments:
    """The sums of all pairs.

    Attributes:
        tokens: how many rows have been added.
        gram: source → float64 (width, width).
        cross: pair → float64 (width, n_expert).
    """

    def __init__(self, pairs: Sequence[Pair], width: int, n_expert: int) -> None:
        self.tokens = 0
        # Full, so that memory is taken here and not bit by bit while the cache counts on it.
        self.gram = {pair.source: np.full((width, width), 0.0) for pair in pairs}
        self.cross = {pair: np.full((width, n_expert), 0.0) for pair in pairs}

    @staticmethod
    def nbytes(pairs: Sequence[Pair], width: int, n_expert: int) -> int:
        """What they take."""
        sources = len({pair.source for pair in pairs})
        return 8 * width * (sources * width + len(pairs) * n_expert)

    def add_source(self, layer: float, hidden: Doubles) -> None:
        """Hidden vectors (rows, width) of a layer."""
        if layer in self.gram:
            self.gram[layer] += hidden.T @ hidden

    def add_pair(self, pair: Pair, hidden: Doubles, logits: Doubles) -> None:
        """Hidden vectors (rows, width) of the source, logits (rows, n_expert) of the target."""
        self.cross[pair] += hidden.T @ logits

    def named(self) -> dict[str, Doubles]:
        """The sums under the names that a checkpoint has."""
        grams = {f"gram {layer}": gram for layer, gram in self.gram.items()}
        return grams | {f"cross {p.target} {p.depth}": c for p, c in self.cross.items()}

    def restore(self, named: dict[str, Doubles], tokens: int) -> None:
        for name, values in self.named().items():
            np.copyto(values, named[name])
        self.tokens = tokens


def ridge(
    gram: Doubles, cross: Doubles, router: Floats, penalties: Sequence[float]
) -> list[Floats]:
    """The matrices M (n_expert, width) that minimise, for each penalty p,

        sum |M x - y|^2 + p * mean(diag(gram)) * |M - router|^2

    A penalty keeps M near the router itself: where a text says little, nothing changes. (Ridge
    regression, Hoerl and Kennard 1970, about a prior mean that is not zero.)

    Args:
        gram, cross: float64 (width, width) and (width, n_expert), as in `Moments`.
        router: float32 (n_expert, width).
    """
    prior = router.T.astype(np.float64)
    residual = cross - gram @ prior
    scale = np.trace(gram) / len(gram)
    found = []
    for penalty in penalties:
        regular = gram.copy()
        regular[np.diag_indices_from(regular)] += penalty * scale
        solved = prior + np.linalg.solve(regular, residual)
        found.append(np.ascontiguousarray(solved.T, np.float32))
    return found
