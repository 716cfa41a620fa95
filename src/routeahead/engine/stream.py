"""What happens at the graph's stops when experts come from disk."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from routeahead.errors import StreamError
from routeahead.experts.layout import ExpertTensor
from routeahead.experts.source import ExpertSource, Load


class Stream:
    """Observer of one context: at each top-k it provides the experts, at each product it waits.

    Attributes:
        mgmt_s: seconds of the evaluation thread in here, waiting excluded.
    """

    def __init__(
        self, source: ExpertSource, tensors: Mapping[int, ExpertTensor], *, overlap: bool
    ) -> None:
        """
        Args:
            tensors: address of an expert tensor's struct → where it lies in the file.
        """
        self.source = source
        self._tensors = tensors
        self._overlap = overlap
        self._load: Load | None = None
        self._order: list[str] = []  # projections as the graph was seen to compute them
        self._known = {tensor.projection for tensor in tensors.values()}
        self.mgmt_s = 0.0

    def routed(self, layer: int, ids: npt.NDArray[np.int32]) -> bool:
        start, stalled = time.perf_counter(), self.source.stall_s
        experts = ids[0].tolist() if len(ids) == 1 else list(dict.fromkeys(ids.ravel().tolist()))
        self._load = self.source.require(layer, experts)
        if self._load and not self._overlap:
            self.source.wait(self._load)
            self._load = None
        self._account(start, stalled)
        return self._load is not None

    def streams(self, tensor: int) -> bool:
        return tensor in self._tensors

    def product(self, tensor: int) -> bool:
        start, stalled = time.perf_counter(), self.source.stall_s
        weights = self._tensors[tensor]
        if self._load is None or self._load.layer != weights.layer:
            raise StreamError(f"{weights.name} is used, but the last top-k was of another layer")
        projection = weights.projection
        if len(self._order) < len(self._known):
            self._learn(projection)
        self.source.wait(self._load, projection)
        if self._load.done():
            self.source.wait(self._load)  # returns at once, or raises what a read met with
            self._load = None
        self._account(start, stalled)
        return self._load is not None

    def faulted(self) -> None:
        self.source.expose()

    def recover(self) -> None:
        """Forgets everything that a void graph left behind."""
        self._load = None
        self.source.recover()

    def _learn(self, projection: str) -> None:
        """The graph is ordered by dependency, not as its source reads: observe, do not assume."""
        if projection not in self._order:
            self._order.append(projection)
            self.source.order_projections(self._order)

    def _account(self, start: float, stalled: float) -> None:
        stall = self.source.stall_s - stalled
        self.mgmt_s += time.perf_counter() - start - stall
