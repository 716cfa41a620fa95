"""What happens at the graph's stops when experts come from disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from routeahead.engine.ownership import Ownership
from routeahead.engine.policies import Policies
from routeahead.engine.window import Window
from routeahead.errors import Stopped, StreamError
from routeahead.experts.layout import ExpertTensor
from routeahead.experts.load import Load
from routeahead.experts.source import ExpertSource
from routeahead.llamacpp.eval_callback import EvalCallback
from routeahead.llamacpp.router_input import RouterInput
from routeahead.routing.policy import Routing
from routeahead.telemetry.route_log import UNKNOWN, RouteLog
from routeahead.types import Floats, Ids, Phase


class Stream:
    """Observer of one context: at each top-k it provides the experts, at each product it waits.

    Attributes:
        policies: whose hooks are called (`routing.policy` has their order).
        mgmt_s: seconds of the evaluation thread in here, waiting for bytes excluded.
        unwanted: asked at each layer of the next batch; if it is true, the batch ends.
    """

    unwanted: Callable[[], bool] | None = None

    def __init__(
        self,
        source: ExpertSource,
        tensors: Mapping[int, ExpertTensor],
        *,
        n_expert: int,
        overlap: bool,
        graph: EvalCallback,
        policies: Policies,
        window: Window,
        ownership: Ownership,
        hidden: RouterInput | None = None,
        log: RouteLog | None = None,
    ) -> None:
        """
        Streams from `source`.

        Args:
            tensors: address of an expert tensor's struct → where it lies in the file.
            graph: whose stops these are.
            window: reads ahead for prompts.
            ownership: of the cache, which is taken from `begin` to `end`.
            hidden: where hidden vectors are read; None if no policy wants them.
            log: is told of each routing.
        """
        self.source = source
        self._tensors, self._n_expert = tensors, n_expert
        self._overlap, self._graph, self._window = overlap, graph, window
        self._ownership = ownership
        self.policies, self._hidden, self._log = policies, hidden, log
        self._watched = bool(policies) or log is not None
        self._load: Load | None = None
        self._routing: Routing | None = None  # of the layer that was routed last, if watched
        self._held = False  # its reads wait until its weights are known
        self._hold = False  # so do those of this batch
        self._ahead = False  # this batch is a prompt's, and later layers are read for
        self._open = False  # a batch has begun and not ended
        self._order: list[str] = []  # projections as the graph was seen to compute them
        self._known = {tensor.projection for tensor in tensors.values()}
        self._position = Positions()
        self.phase: Phase = "prefill"
        self.mgmt_s = 0.0

    def begin(self, phase: Phase, position: int, rows: int = 0, *, whole: bool = False) -> None:
        """A batch whose first token stands at `position` is about to be evaluated.

        `rows` and `whole` are as `Window.begin` has them.
        """
        if self._open:  # nobody announced the end of the batch before, nor its begin
            self.end()
            if self._log:
                self._log.end_of_batch()
        self._ownership.take()
        self.phase, self._open = phase, True
        self.source.begin()
        self._position.begin(position)
        for policy in self.policies.begin:
            policy.begin(phase, position)
        self._hold = any([policy.wants_weights(phase) for policy in self.policies.weighted])
        # What is dropped is not read, and what is dropped depends on what is here.
        self._ahead = phase == "prefill" and self._overlap and not self._hold
        if self._ahead:
            self._window.begin(rows, whole=whole)
        if self._hidden:
            wanted = [policy.wants_hidden(phase) for policy in self.policies.wants_hidden]
            attended = [p.wants_attention_input(phase) for p in self.policies.before_attention]
            self._hidden.begin(reading=any(wanted), attending=any(attended))
        if self._log and position == 0:
            self._log.turn()
        self._graph.serve_slots(*self.source.slot_range)
        if phase == "decode" and not self._watched and self.source.settled is not None:
            self._graph.rest(self.source.settled)

    def end(self) -> None:
        """The batch was evaluated."""
        self._open, self.unwanted = False, None
        if self._ahead and self._window.finished():
            self.source.finish_ahead()
        self.source.cache.hits += self._graph.rested
        for policy in self.policies.end:
            policy.end()
        if self.policies:
            self.source.release()
        self._ownership.give()

    def before_attention(self, layer: int, hidden: Floats) -> None:
        start, stalled = time.perf_counter(), self.source.stall_s
        for policy in self.policies.before_attention:
            policy.before_attention(layer, hidden)
        self._account(start, stalled)

    def routed(self, layer: int, ids: Ids, hidden: Floats | None) -> bool:
        start, stalled = time.perf_counter(), self.source.stall_s
        if self.unwanted and self.unwanted():
            raise Stopped(f"nobody wants this batch: it was ended at layer {layer}")
        if self._watched:
            self._decide(layer, ids, hidden)
        self._held = self._hold
        if not self._held:
            self._provide(layer, ids)
        if self._routing:
            for policy in self.policies.predict:
                policy.predict(self._routing)
            self._routing.hidden = None  # the graph reuses its memory from here on
        if not self._held:
            self._provided()
        if self._ahead:
            self._window.routed(layer, ids)
        self._account(start, stalled)
        return self._held or self._load is not None

    def _decide(self, layer: int, ids: Ids, hidden: Floats | None) -> None:
        """Lets the policies change the routing, and logs what became of it."""
        positions = self._position.rows(layer, len(ids))
        lent = self._graph.ranked_for
        router = ids.copy() if self._log else None
        if router is not None and lent is not None:
            router[:] = UNKNOWN
        routing = self._routing = Routing(
            self.phase,
            layer,
            positions,
            ids,
            n_expert=self._n_expert,
            experts=self.source,
            scores=self._graph.selection_scores,
            hidden=hidden,
            ranked_for=lent,
            probabilities=self._graph.probabilities,
        )
        for policy in self.policies.routed:
            policy.routed(routing)
        if lent is not None and not routing.committed:
            raise StreamError(
                f"layer {layer} has the experts of layer {lent}, whom it lent its router"
            )
        if self._log and router is not None:
            cache = self.source.cache
            resident = {e for e in np.unique(ids).tolist() if cache.would_hit(layer, e)}
            self._log.routed(
                self.phase,
                layer,
                positions,
                ids,
                router,
                resident,
                self._graph.selection_scores if lent is None else _no_scores,
                committed=routing.committed,
            )

    @property
    def holding(self) -> bool:
        return self._held

    def final_weights(self, weights: Floats) -> bool:
        start, stalled = time.perf_counter(), self.source.stall_s
        routing = self._routing
        if self._held and routing:
            if self._log:
                self._log.weights(weights)
            routing.weigh(weights)
            for policy in self.policies.weighted:
                policy.weighted(routing)
            if self._log and routing.dropped is not None:
                self._log.dropped(routing.dropped)
            self._provide_held(routing)
        self._account(start, stalled)
        return self._load is not None

    def _provide_held(self, routing: Routing) -> None:
        """The routing that was held back until its weights were known is final."""
        self._held = False
        self._provide(routing.layer, routing.ids)
        self._provided()

    def _provide(self, layer: int, ids: Ids) -> None:
        """Starts reading what the layer lacks."""
        experts = ids[0].tolist() if len(ids) == 1 else ids.ravel().tolist()
        if len(ids) != 1 or self.policies:  # a policy may have chosen an expert twice in a row
            experts = list(dict.fromkeys(experts))
        self._load = self.source.require(layer, experts, ids if len(ids) != 1 else None)
        self._graph.use_slots(self.source.table.slots(layer, ids))

    def _provided(self) -> None:
        """The layer's reads are with the lanes: others may follow them."""
        if self._routing:
            for policy in self.policies.issued:
                policy.issued(self._routing)
        if self._load and not self._overlap:
            self.source.wait(self._load)
            self._load = None

    def streams(self, tensor: int) -> bool:
        return tensor in self._tensors

    def product(self, tensor: int) -> bool:
        start, stalled = time.perf_counter(), self.source.stall_s
        weights = self._tensors[tensor]
        if self._held and self._routing and self._routing.layer == weights.layer:
            self._provide_held(self._routing)  # no node was found at which its weights are final
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
        for policy in self.policies.product:
            policy.product(weights.layer)
        self._account(start, stalled)
        return self._load is not None

    def log_weights(self, weights: Floats) -> None:
        if self._log:
            self._log.weights(weights)

    def faulted(self) -> None:
        self.source.expose()

    def recover(self) -> None:
        """Forgets everything that a void graph left behind."""
        self._ownership.take()
        self._load = self._routing = None
        self._held = self._open = False
        self.unwanted = None
        self.policies.recover()
        self.source.recover()
        self._ownership.give()

    def _learn(self, projection: str) -> None:
        """The graph is ordered by dependency, not as its source reads: observe, do not assume."""
        if projection not in self._order:
            self._order.append(projection)
            self.source.table.order(self._order)

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


def _no_scores() -> None:
    """Those of a layer whose router product served another one are not known."""
