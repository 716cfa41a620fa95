"""Route-ahead in the engine: rows in, predictions made, rankings and early reads out.

In a layer's callback, in this order (`Stream.routed`):

1. `settle`: rankings that have arrived are handed to the policy; with late="wait" the one for
   this very layer is waited for. The watchdog looks at the router's choice.
2. The policies commit the routing and the layer's own reads go to the lanes.
3. `predict`: the row is given to the predictor, for the layer N further on, and the experts of
   every ranking that has arrived are read early.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from routeahead.engine import ggml
from routeahead.engine.gate_tap import GateTap, Row
from routeahead.engine.gates import Gate, Precision
from routeahead.engine.predictor import Inline, Prediction, Worker
from routeahead.routing.route_ahead import Reason, RouteAhead
from routeahead.telemetry.counters import Phase

Ids = npt.NDArray[np.int32]
ReadEarly = Callable[[int, Sequence[int]], None]
Recorded = Callable[[int, int], Ids]

_PREDICTORS: dict[str, type[Inline] | type[Worker]] = {"inline": Inline, "worker": Worker}


@dataclass
class AheadTimes:
    """Seconds since the load.

    Attributes:
        gemv_s: CPU time of router products and rankings, of whichever thread computed them.
        issue_s: the evaluation thread giving away rows and early reads.
        wait_s: the evaluation thread waiting for rankings.
        watchdog_s: the same as gemv_s for the watchdog's products, and comparing.
    """

    gemv_s: float = 0.0
    issue_s: float = 0.0
    wait_s: float = 0.0
    watchdog_s: float = 0.0


class Ahead:
    """Joins the gate tap, the predictor and the policy. Belongs to the evaluation thread.

    Attributes:
        policy: decides what is committed.
        times: what it costs.
    """

    def __init__(
        self,
        layers: Sequence[int],
        depth: int,
        tap: GateTap,
        *,
        compute: Literal["inline", "worker"],
        late: Literal["pass", "wait"],
        precision: Precision,
        read_early: ReadEarly,
        recorded: Recorded | None = None,
    ) -> None:
        """
        Args:
            layers: numbers of the MoE layers, in order.
            depth: N.
            read_early: called with a layer and the experts that it will certainly use.
            recorded: (position, layer) → ids that take the place of every ranking (a forced run).
        """
        self.policy = RouteAhead(list(layers), depth)
        self.times = AheadTimes()
        self._layers, self._tap, self._late, self._precision = layers, tap, late, precision
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._gates: dict[int, Gate] = {}
        self._predictor = _PREDICTORS[compute](self._rank)
        self._read_early, self._recorded = read_early, recorded
        self._asked: deque[Prediction] = deque()  # not yet collected, oldest first
        self._fresh: list[tuple[int, Ids]] = []  # layers and rankings to read for
        self._unknown = 0  # layers whose selection rule was not understood
        self._decoding = False
        self._position = 0

    def begin(self, phase: Phase, position: int) -> None:
        """A batch begins; in decode, with the token at `position`."""
        self._decoding, self._position = phase == "decode", position
        self._forget()
        self.policy.begin()
        self._tap.begin(reading=self._decoding and self.policy.armed)
        if self._decoding and len(self._gates) + self._unknown < len(self._tap.routers):
            self._prepare_gates()

    def settle(self, layer: int, ids: Ids, row: Row | None) -> None:
        """At the top-k of `layer`, before its routing is decided; `ids` are the router's own."""
        if not self._decoding or not self.policy.armed:
            return
        index = self._index[layer]
        if self._asked:
            self._collect(index, wait=self._late == "wait")
        if self.policy.watches() and row is not None and len(ids) == 1 and index in self._gates:
            router = ids[0].copy()
            self._submit(Prediction(self.policy.serial, index, row, router))

    def predict(self, layer: int, rows: int, row: Row | None) -> None:
        """At the same top-k, after its own reads were issued; `row` is the gate's input."""
        if not self._decoding or not self.policy.armed:
            return
        start, computed = time.perf_counter(), self.times.gemv_s
        index = self._index[layer]
        target = index + self.policy.depth
        if target < len(self._layers):
            if row is None:
                why: Reason = "several_rows" if rows != 1 else "unreadable"
                self.policy.cannot_predict(target, why)
            elif target not in self._gates:
                self.policy.cannot_predict(target, "first_token")
            else:
                self._submit(Prediction(self.policy.serial, target, row))
        self._issue(index)
        inline = self.times.gemv_s - computed if isinstance(self._predictor, Inline) else 0.0
        self.times.issue_s += max(0.0, time.perf_counter() - start - inline)

    def poll(self, layer: int) -> None:
        """At a later stop of `layer`: what a worker has predicted meanwhile can be read."""
        if self._asked:
            start = time.perf_counter()
            self._issue(self._index[layer])
            self.times.issue_s += time.perf_counter() - start

    def recover(self) -> None:
        """After a fault: no prediction of the void token is of use."""
        self._forget()
        self.policy.begin()

    def close(self) -> None:
        self._forget()
        self._predictor.close()

    def _forget(self) -> None:
        for prediction in self._asked:
            prediction.void = True
        self._asked.clear()
        self._fresh.clear()

    def _issue(self, index: int) -> None:
        """Reads for the rankings that have arrived. At `index` is the layer that runs now."""
        if self._asked:
            self._collect(index, wait=False)
        for layer, ids in self._fresh:
            self._read_early(layer, ids.tolist())
        self._fresh.clear()

    def _submit(self, prediction: Prediction) -> None:
        self._asked.append(self._predictor.submit(prediction))

    def _collect(self, index: int, *, wait: bool) -> None:
        """Takes what the predictor has finished. At `index` is the layer that runs now.

        Raises:
            BaseException: whatever a prediction met with.
        """
        while self._asked and (self._asked[0].done or (wait and self._asked[0].index <= index)):
            prediction = self._asked[0]
            if not prediction.done:
                start = time.perf_counter()
                prediction.wait()
                self.times.wait_s += time.perf_counter() - start
            self._asked.popleft()
            self._take(prediction, index)
        for prediction in self._asked:
            if prediction.index <= index and prediction.router is None:
                prediction.void = True  # its layer goes on without it

    def _take(self, prediction: Prediction, index: int) -> None:
        if prediction.error:
            raise prediction.error
        ids, target = prediction.ids, prediction.index
        if prediction.router is not None:
            self._watch(prediction.router, ids, prediction.cpu_s)
            return
        self.times.gemv_s += prediction.cpu_s
        if ids is None or target < index:
            return
        layer = self._layers[target]
        if self._recorded:
            ids = self._recorded(self._position, layer)
        if self.policy.offer(prediction.serial, target, ids) and target > index:
            self._fresh.append((layer, ids))

    def _prepare_gates(self) -> None:
        """For the layers that the prompt has shown. No prediction is under way."""
        self._unknown = 0
        for layer, router in self._tap.routers.items():
            index = self._index[layer]
            if router is None:
                self._unknown += 1
            elif index not in self._gates:
                self._gates[index] = Gate(ggml.tensor_at(router.gate), self._precision)
        if self._unknown:
            warnings.warn(
                f"route-ahead does not understand how {self._unknown} layers choose their experts: "
                "they keep their router's choice",
                stacklevel=2,
            )

    def _rank(self, index: int, row: Row) -> Ids:
        """Runs on the predictor's thread."""
        router = self._tap.routers[self._layers[index]]
        assert router  # it has a gate
        return router.rule.select(self._gates[index].logits(row))

    def _watch(self, router: Ids, ids: Ids | None, cpu_s: float) -> None:
        start = time.perf_counter()
        why = self.policy.watch(router, ids) if ids is not None else ""
        if why:
            self._disarm(why)
        self.times.watchdog_s += cpu_s + time.perf_counter() - start

    def _disarm(self, why: str) -> None:
        self._forget()
        warnings.warn(
            f"route-ahead has disarmed itself: {why}; from here on every routing is the router's "
            "own until the model is closed",
            stacklevel=2,
        )
