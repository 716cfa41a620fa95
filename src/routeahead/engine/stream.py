"""What happens at the graph's stops when experts come from disk."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from routeahead.engine.policies import Steering
from routeahead.errors import StreamError
from routeahead.experts.layout import ExpertTensor
from routeahead.experts.source import ExpertSource, Load
from routeahead.llamacpp.eval_callback import GraphHook
from routeahead.routing.policy import Routing
from routeahead.telemetry.counters import Phase
from routeahead.telemetry.route_log import RouteLog


class Stream:
    """Observer of one context: at each top-k it provides the experts, at each product it waits.

    Attributes:
        steering: the policies and their helpers.
        mgmt_s: seconds of the evaluation thread in here, waiting for bytes excluded.
    """

    def __init__(
        self,
        source: ExpertSource,
        tensors: Mapping[int, ExpertTensor],
        *,
        overlap: bool,
        graph: GraphHook,
        steering: Steering,
        log: RouteLog | None = None,
    ) -> None:
        """
        Args:
            tensors: address of an expert tensor's struct → where it lies in the file.
            graph: whose stops these are.
            log: is told of each routing.
        """
        self.source = source
        self._tensors = tensors
        self._overlap = overlap
        self._graph, self.steering, self._log = graph, steering, log
        self._load: Load | None = None
        self._held: tuple[int, npt.NDArray[np.int32]] | None = None  # routed, weights unknown yet
        self._order: list[str] = []  # projections as the graph was seen to compute them
        self._known = {tensor.projection for tensor in tensors.values()}
        self._position = Positions()
        self.phase: Phase = "prefill"
        self.mgmt_s = 0.0

    def begin(self, phase: Phase, position: int) -> None:
        """A batch whose first token stands at `position` is about to be evaluated."""
        self.phase = phase
        self.source.begin()
        self._position.begin(position)
        if self.steering.ahead:
            self.steering.ahead.begin(phase, position)
        if self.steering.probe:
            self.steering.probe.begin(phase)
        if self._log and position == 0:
            self._log.turn()
        self._graph.serve_slots(*self.source.slot_range)
        idle = not any(vars(self.steering).values()) and self._log is None
        if phase == "decode" and idle and self.source.settled is not None:
            self._graph.rest(self.source.settled)

    def end(self) -> None:
        """The batch was evaluated."""
        self.source.cache.hits += self._graph.rested
        if self.steering.ahead:
            self.source.release()

    def routed(
        self, layer: int, ids: npt.NDArray[np.int32], row: npt.NDArray[np.float32] | None
    ) -> bool:
        start, stalled = time.perf_counter(), self.source.stall_s
        steering = self.steering
        if steering.probe:
            steering.probe.routed(layer, ids, row)
        if steering.ahead:
            steering.ahead.settle(layer, ids, row)
        if steering.policies or self._log:
            self._decide(layer, ids)
        hold = steering.drop is not None and steering.drop.armed(self.phase)
        if hold:
            self._held = layer, ids
        else:
            self._provide(layer, ids)
        if steering.ahead:
            steering.ahead.predict(layer, len(ids), row)
        if not hold:
            self._provided(layer)
        self._account(start, stalled)
        return hold or self._load is not None

    @property
    def holding(self) -> bool:
        return self._held is not None

    def final_weights(self, weights: npt.NDArray[np.float32]) -> bool:
        start, stalled = time.perf_counter(), self.source.stall_s
        if self._held and self.steering.drop:
            layer, ids = self._held
            if self._log:
                self._log.weights(weights)
            dropped = self.steering.drop.drop(layer, ids, weights, self.source.resident)
            if self._log:
                self._log.dropped(dropped)
            self._provide_held()
        self._account(start, stalled)
        return self._load is not None

    def _provide_held(self) -> None:
        """The routing that was held back until its weights were known is final."""
        assert self._held
        (layer, ids), self._held = self._held, None
        self._provide(layer, ids)
        self._provided(layer)

    def _provide(self, layer: int, ids: npt.NDArray[np.int32]) -> None:
        """Starts reading what the layer lacks, then what later ones may."""
        experts = ids[0].tolist() if len(ids) == 1 else ids.ravel().tolist()
        if len(ids) != 1 or self.steering.drop:  # a dropped slot has its top expert's id
            experts = list(dict.fromkeys(experts))
        self._load = self.source.require(layer, experts)
        self._graph.use_slots(self.source.slots(layer, ids))
        if self.steering.temporal and self.phase == "decode":
            for target, guess in self.steering.temporal.guesses(layer):
                self.source.guess(target, guess)
        if self.steering.temporal:
            self.steering.temporal.routed(layer, ids)

    def _provided(self, layer: int) -> None:
        """The layer's reads are with the lanes: others may follow them."""
        if self.steering.ahead:
            self.steering.ahead.issue(layer)
        if self._load and not self._overlap:
            self.source.wait(self._load)
            self._load = None

    def _decide(self, layer: int, ids: npt.NDArray[np.int32]) -> None:
        """Lets the policies change the routing, and logs what became of it."""
        positions = self._position.rows(layer, len(ids))
        router = ids.copy()
        scores = self._graph.selection_scores
        routing = Routing(self.phase, layer, positions, ids, scores, self.source.resident)
        committed = False
        for policy in self.steering.policies:
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
        if self._held and self._held[0] == weights.layer:
            self._provide_held()  # no node was found at which its weights are final
            if self._load is None:
                self._account(start, stalled)
                return False
        if self._load is None or self._load.layer != weights.layer:
            raise StreamError(f"{weights.name} is used, but the last top-k was of another layer")
        if len(self._order) < len(self._known):
            self._learn(weights.projection)
        self.source.wait(self._load, weights.projection)
        if self._load.done():
            self.source.wait(self._load)  # returns at once, or raises what a read met with
            self._load = None
        if self.steering.ahead:
            self.steering.ahead.issue(weights.layer)
        self._account(start, stalled)
        return self._load is not None

    def log_weights(self, weights: npt.NDArray[np.float32]) -> None:
        if self._log:
            self._log.weights(weights)

    def faulted(self) -> None:
        self.source.expose()

    def recover(self) -> None:
        """Forgets everything that a void graph left behind."""
        self._load = self._held = None
        if self.steering.ahead:
            self.steering.ahead.recover()
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
