"""Predicting by gates in the engine: rows in, predictions made, rankings and early reads out.

Route-ahead commits what is predicted here, predicted prefetch only reads it. In a layer's
callback, in this order (`Stream.routed`):

1. `settle`: rankings that have arrived are handed to the policy; with late="wait" the one for
   this very layer is waited for. The watchdog looks at the router's choice.
2. The policies decide the routing, and the layer's own reads go to the lanes. (With dropping, they
   go when the weights are known, and 3 comes before that: the row does not live so long.)
3. `predict`: the row is given to the predictor, for the layer N further on.
4. `issue`: the experts of every ranking that has arrived are read early.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from routeahead.llamacpp.router_input import Row
from routeahead.policies.route_ahead import Reason
from routeahead.prediction.ranker import Ranker
from routeahead.prediction.watchdog import Watchdog
from routeahead.prediction.worker import Inline, Prediction, Worker
from routeahead.telemetry.counters import Phase

Ids = npt.NDArray[np.int32]
ReadEarly = Callable[[int, Sequence[int]], None]
Resident = Callable[[int, int], bool]
Recorded = Callable[[int, int], Ids]

_PREDICTORS: dict[str, type[Inline] | type[Worker]] = {"inline": Inline, "worker": Worker}


@dataclass
class AheadTimes:
    """Seconds since the load.

    Attributes:
        gemv_s: router products and rankings: a worker's CPU time, or the evaluation thread's time.
        issue_s: the evaluation thread giving away rows and early reads.
        wait_s: the evaluation thread waiting for rankings.
        watchdog_s: the same as gemv_s for the watchdog's products, and comparing.
    """

    gemv_s: float = 0.0
    issue_s: float = 0.0
    wait_s: float = 0.0
    watchdog_s: float = 0.0


class Policy(Protocol):
    """What is done with rankings. `depth` in MoE layers; `serial` numbers the steps."""

    depth: int
    serial: int

    def begin(self) -> None: ...

    def offer(self, serial: int, index: int, ids: Ids) -> bool: ...

    def cannot_predict(self, index: int, reason: Reason) -> None: ...


class Ahead:
    """Joins the ranker, the predictor and a policy. Belongs to the evaluation thread.

    Attributes:
        policy: what the rankings are for.
        ranker: where they come from.
        watchdog: once it has bitten, there are no more.
        times: what it costs.
    """

    def __init__(
        self,
        layers: Sequence[int],
        policy: Policy,
        ranker: Ranker,
        watchdog: Watchdog,
        *,
        compute: Literal["inline", "worker"],
        late: Literal["pass", "wait"],
        read_early: ReadEarly,
        resident: Resident,
        recorded: Recorded | None = None,
        cold_share: float = 0.0,
    ) -> None:
        """
        Args:
            layers: numbers of the MoE layers, in order.
            read_early: called with a layer and the experts that were predicted, best first.
            resident: (layer, expert) → whether using it causes no read.
            recorded: (position, layer) → ids that take the place of every ranking (a forced run).
            cold_share: predicted share of a routing below which an expert is going to be dropped
                if it is not resident, so that it is not read early; the top expert always is.
        """
        self.policy, self.ranker, self.watchdog = policy, ranker, watchdog
        self.times = AheadTimes()
        self._layers, self._late = layers, late
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._predictor = _PREDICTORS[compute](self._rank)
        self._read_early, self._recorded = read_early, recorded
        self._cold_share, self._resident = cold_share, resident
        self._asked: deque[Prediction] = deque()  # not yet collected, oldest first
        self._fresh: list[tuple[int, list[int]]] = []  # layers and experts to read for
        self._decoding = False
        self._position = 0

    def begin(self, phase: Phase, position: int) -> None:
        """A batch begins; in decode, with the token at `position`."""
        self._decoding, self._position = phase == "decode", position
        self._forget()
        self.policy.begin()
        self.ranker.tap.begin(reading=self._decoding and self.watchdog.armed)
        if self._decoding:
            self.ranker.prepare()

    def settle(self, layer: int, ids: Ids, row: Row | None) -> None:
        """At the top-k of `layer`, before its routing is decided; `ids` are the router's own."""
        if not self._decoding or not self.watchdog.armed:
            return
        index = self._index[layer]
        if self._asked:
            self._collect(index, wait=self._late == "wait")
        if self.watchdog.wants() and row is not None and len(ids) == 1 and index in self.ranker:
            router = ids[0].copy()
            self._submit(Prediction(self.policy.serial, index, row, router), index)

    def predict(self, layer: int, rows: int, row: Row | None) -> None:
        """At the same top-k; `row` is the gate's input."""
        if not self._decoding or not self.watchdog.armed:
            return
        start, inline = time.perf_counter(), 0.0
        index = self._index[layer]
        target = index + self.policy.depth
        if target < len(self._layers):
            if row is None:
                why: Reason = "several_rows" if rows != 1 else "unreadable"
                self.policy.cannot_predict(target, why)
            elif target not in self.ranker:
                self.policy.cannot_predict(target, "first_token")
            else:
                prediction = Prediction(self.policy.serial, target, row)
                self._submit(prediction, index)
                inline = prediction.spent_s if isinstance(self._predictor, Inline) else 0.0
        self.times.issue_s += max(0.0, time.perf_counter() - start - inline)

    def issue(self, layer: int) -> None:
        """At any stop of `layer` after its own reads: those for the rankings that have arrived."""
        if not (self._asked or self._fresh):
            return
        start = time.perf_counter()
        if self._asked:
            self._collect(self._index[layer], wait=False)
        for target, experts in self._fresh:
            self._read_early(target, experts)
        self._fresh.clear()
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

    def _submit(self, prediction: Prediction, index: int) -> None:
        """At `index` is the layer that runs now."""
        self._predictor.submit(prediction)
        if isinstance(self._predictor, Inline):
            self._take(prediction, index)
        else:
            self._asked.append(prediction)

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
            self._watch(prediction.router, ids, prediction.spent_s)
            return
        self.times.gemv_s += prediction.spent_s
        if ids is None or target < index:
            return
        layer = self._layers[target]
        if self._recorded:
            ids = self._recorded(self._position, layer)
        if self.policy.offer(prediction.serial, target, ids) and target > index:
            self._fresh.append((layer, self._worth_reading(layer, ids, prediction)))

    def _worth_reading(self, layer: int, ids: Ids, prediction: Prediction) -> list[int]:
        """The experts of a ranking, less those that are going to be dropped unread."""
        experts: list[int] = ids.tolist()
        if prediction.logits is None:
            return experts
        shares = self.ranker.rule(prediction.index).shares(prediction.logits, ids).tolist()
        top = max(shares)
        return [
            expert
            for expert, share in zip(experts, shares, strict=True)
            if share >= self._cold_share or share == top or self._resident(layer, expert)
        ]

    def _rank(self, prediction: Prediction) -> Ids:
        """Runs on the predictor's thread."""
        index = prediction.index
        logits = self.ranker.logits(index, prediction.row)
        if self._cold_share:
            prediction.logits = logits.copy()
        return self.ranker.rule(index).select(logits)

    def _watch(self, router: Ids, ids: Ids | None, spent_s: float) -> None:
        start = time.perf_counter()
        why = self.watchdog.watch(router, ids) if ids is not None else ""
        if why:
            self._disarm(why)
        self.times.watchdog_s += spent_s + time.perf_counter() - start

    def _disarm(self, why: str) -> None:
        self._forget()
        warnings.warn(
            f"predictions have disarmed themselves: {why}; from here on every routing is the "
            "router's own, and read when it is known, until the model is closed",
            stacklevel=2,
        )
