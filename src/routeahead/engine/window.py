"""What the next layers of a prompt are expected to use: read while a layer computes.

With many rows in a ubatch, a layer uses nearly all of its experts, so they can be read before the
layer has routed. What it turns out not to use is taken back, if no lane has begun to read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from routeahead.experts.layout import MIB
from routeahead.experts.source import ExpertSource
from routeahead.types import Ids

_LIKELY = 0.5
"""An expert that is used with less than this probability is not read ahead: reads that later prove
useless would outweigh the time that the others save."""

WINDOW = 512 * MIB
"""Bytes that may be read ahead for a prompt, or those of one layer if it has fewer."""


class Usage:
    """How often a layer's experts were used, by ubatch; older ones count half as much each time."""

    def __init__(self, n_expert: int, top_k: int) -> None:
        self._rows = 0.0
        self._counts = np.zeros(n_expert)
        self._uniform = top_k / n_expert

    @property
    def known(self) -> bool:
        """Whether the layer was ever routed."""
        return self._rows > 0

    def add(self, ids: Ids) -> float:
        """Counts a routing (rows, top-k).

        Returns how many rows of independent and uniform routings would use as many experts: fewer
        than there are if the rows are alike.
        """
        counts = np.bincount(ids.ravel(), minlength=len(self._counts))
        self._rows = self._rows / 2 + len(ids)
        self._counts = self._counts / 2 + counts
        unused = np.count_nonzero(counts == 0) / len(counts)
        if not unused or self._uniform >= 1:
            return len(ids)
        return min(len(ids), math.log(unused) / math.log(1 - self._uniform))

    def likely(self, rows: float) -> list[int]:
        """Experts that `rows` further rows will use with a probability of at least `_LIKELY`.

        Likeliest first, and those that are equally likely in the order of the file. A row uses an
        expert as often as rows did before, where the prior is one row of a uniform routing; rows
        are taken as independent, which overestimates the union of a text's.
        """
        share = np.minimum((self._counts + self._uniform) / (self._rows + 1), 1.0)
        used = 1.0 - (1.0 - share) ** rows
        order: npt.NDArray[np.intp] = np.argsort(-share, kind="stable")
        found: list[int] = order[used[order] >= _LIKELY].tolist()
        return found


class Window:
    """Reads ahead for one context's prompts, as far as the source's window has room.

    A prompt is evaluated in batches, a batch in ubatches, each of which passes through all layers;
    what follows the last layer is the first one of the next ubatch.

    Attributes:
        ubatch: rows that llama.cpp evaluates at once, at most.
        most: rows that it has evaluated at once, at most.
        buffer: bytes that so many rows take in its compute buffer, beyond the default's.
    """

    def __init__(
        self,
        source: ExpertSource,
        experts: Mapping[int, tuple[int, int]],
        *,
        ubatch: int,
        buffer: Callable[[int], int],
    ) -> None:
        """`experts` are layer → (experts, top-k), of all layers in order."""
        self._source, self.ubatch, self.buffer, self.most = source, ubatch, buffer, 0
        self._layers = list(experts)
        self._usage = {layer: Usage(*numbers) for layer, numbers in experts.items()}
        self._rows = self._left = 0
        self._whole = False
        self._first = True

    def begin(self, rows: int, *, whole: bool) -> None:
        """A batch begins, with which the rest of a prompt has `rows` rows; 0 if nobody knows.

        With `whole`, all rows have an output; else the last layer, which routes only rows that have
        one, uses few experts.
        """
        self._left, self._rows, self._whole, self._first = rows, 0, whole, True

    def routed(self, layer: int, ids: Ids) -> None:
        """A layer has its experts, or they are being read: begins to read for those behind it."""
        if self._first or layer == self._layers[0]:  # a ubatch begins
            self._first, self._rows = False, len(ids)
            self._left = max(0, self._left - self._rows)
            self.most = max(self.most, self._rows)
        alike = self._usage[layer].add(ids) if len(ids) else 0.0
        for later, rows in self._behind(layer):
            usage = self._usage[later]
            # Of a layer that is not known, what this one made of the same rows tells most.
            likely = usage.likely(rows if usage.known else min(rows, alike))
            if not self._source.read_ahead(later, likely):
                return

    def finished(self) -> bool:
        """Whether no further ubatch of the prompt is known of."""
        return not self._left

    def _behind(self, layer: int) -> Iterator[tuple[int, int]]:
        """The later layers of this ubatch and those of the next one, with their rows."""
        at = self._layers.index(layer)
        yield from self._with_rows(self._layers[at + 1 :], self._rows)
        yield from self._with_rows(self._layers[:at], min(self.ubatch, self._left))

    def _with_rows(self, layers: list[int], rows: int) -> Iterator[tuple[int, int]]:
        for layer in layers:
            if rows and (self._whole or layer != self._layers[-1]):
                yield layer, rows
