"""What happens at the graph's stops when experts come from disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from routeahead.engine.ahead import Ahead
from routeahead.errors import StreamError
from routeahead.experts.layout import ExpertTensor
from routeahead.experts.source import ExpertSource, Load
from routeahead.routing.policy import Routing, RoutingPolicy
from routeahead.telemetry.counters import Phase
from routeahead.telemetry.route_log import RouteLog


class Stream:
    """Observer of one context: at each top-k it provides the experts, at each product it waits.

    Attributes:
        mgmt_s: seconds of the evaluation thread in here, waiting for bytes excluded.
    """

    def __init__(
        self,
        source: ExpertSource,
        tensors: Mapping[int, ExpertTensor],
        *,
        overlap: bool,
        policies: Sequence[RoutingPolicy] = (),
        log: RouteLog | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """
        Args:
            tensors: address of an expert tensor's struct → where it lies in the file.
            policies: may change each routing, in this order.
            log: is told of each routing.
            ahead: predicts routings; its policy is one of `policies`.
        """
        self.source = source
        self._tensors = tensors
        self._overlap = overlap
        self._policies, self._log, self.ahead = policies, log, ahead
        self._load: Load | None = None
        self._order: list[str] = []  # projections as the graph was seen to compute them
        self._known = {tensor.projection for tensor in tensors.values()}
        self._position = Positions()
        self.phase: Phase = "prefill"
        self.mgmt_s = 0.0

    def begin(self, phase: Phase, position: int) -> None:
        """A batch whose first token stands at `position` is about to be evaluated."""
        self.phase = phase
        self._position.begin(position)
        if self.ahead:
            self.ahead.begin(phase, position)
        if self._log and position == 0:
            self._log.turn()

    def end(self) -> None:
        """The batch was evaluated."""
        if self.ahead:
            self.source.release()

    def routed(
        self, layer: int, ids: npt.NDArray[np.int32], row: npt.NDArray[np.float32] | None
    ) -> bool:
        start, stalled = time.perf_counter(), self.source.stall_s
        if self.ahead:
            self.ahead.settle(layer, ids, row)
        if self._policies or self._log:
            self._decide(layer, ids)
        experts = ids[0].tolist() if len(ids) == 1 else list(dict.fromkeys(ids.ravel().tolist()))
        self._load = self.source.require(layer, experts)
        if self.ahead:
            self.ahead.predict(layer, len(ids), row)
        if self._load and not self._overlap:
            self.source.wait(self._load)
            self._load = None
        self._account(start, stalled)
        return self._load is not None

    def _decide(self, layer: int, ids: npt.NDArray[np.int32]) -> None:
        """Lets the policies change the routing, and logs what became of it."""
        positions = self._position.rows(layer, len(ids))
        router = ids.copy()
        routing = Routing(self.phase, layer, positions, ids)
        committed = False
        for policy in self._policies:
            committed |= policy.commit(routing)
        if self._log:
            cache = self.source.cache
            resident = {e for e in np.unique(ids).tolist() if cache.would_hit(layer, e)}
            self._log.routed(
                self.phase, layer, positions, ids, router, resident, committed=committed
            )

    def streams(self, tensor: int) -> bool:
        return tensor in self._tensors

    def product(self, tensor: int) -> bool:
        start, stalled = time.perf_counter(), self.source.stall_s
        weights = self._tensors[tensor]
        if self._load is None or self._load.layer != weights.layer:
            raise StreamError(f"{weights.name} is used, but the last top-k was of another layer")
        if len(self._order) < len(self._known):
            self._learn(weights.projection)
        self.source.wait(self._load, weights.projection)
        if self._load.done():
            self.source.wait(self._load)  # returns at once, or raises what a read met with
            self._load = None
        if self.ahead:
            self.ahead.poll(weights.layer)
        self._account(start, stalled)
        return self._load is not None

    def weighted(self, weights: npt.NDArray[np.float32]) -> None:
        if self._log:
            self._log.weighted(weights)

    def faulted(self) -> None:
        self.source.expose()

    def recover(self) -> None:
        """Forgets everything that a void graph left behind."""
        self._load = None
        if self.ahead:
            self.ahead.recover()
        self.source.recover()

    def _learn(self, projection: str) -> None:
        """The graph is ordered by dependency, not as its source reads: observe, do not assume."""
        if projection not in self._order:
            self._order.append(projection)
            self.source.order_projections(self._order)

    def _account(self, start: float, stalled: float) -> None:
        stall = self.source.stall_s - stalled
        self.mgmt_s += time.perf_counter() - start - stall


class Positions:
    """Which positions of the sequence the rows of a top-k stand for.

    A batch is evaluated in ubatches, each of which passes through all layers. The last layer of a
    ubatch may route fewer rows than the first did, those whose output is wanted; the engine asks
    for the output of the last rows only.
    """

    def __init__(self) -> None:
        self._next = self._rows = self._layer = 0

    def begin(self, position: int) -> None:
        """A batch begins at `position`."""
        self._next, self._rows, self._layer = position, 0, -1

    def rows(self, layer: int, count: int) -> npt.NDArray[np.int64]:
        """Positions of the `count` rows of `layer`."""
        if layer <= self._layer or self._layer < 0:  # the first MoE layer of a ubatch
            self._next += self._rows
            self._rows = count
        self._layer = layer
        end = self._next + self._rows
        return np.arange(end - count, end)
