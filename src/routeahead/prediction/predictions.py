"""Predictions by routers: hidden vectors in, rankings and early reads out.

Route-ahead commits what is predicted here, predicted prefetch only reads it. In a layer's hooks, in
this order (`routing.policy`):

1. `settle`, in `routed`: rankings that have arrived are handed to the policy; with late="wait" the
   one for this very layer is waited for. The watchdog looks at the router's choice.
2. `predict`: the hidden vectors are given to the predictor, for the layer N further on.
3. `issue`, in `issued` and `product`: the experts of every ranking that has arrived are read early.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import numpy as np

from routeahead.prediction.watchdog import Watchdog
from routeahead.prediction.worker import Inline, Prediction, Worker
from routeahead.routing.policy import Model, Precision, Routing
from routeahead.telemetry.counters import Totals
from routeahead.types import Ids, Phase

Compute = Literal["inline", "worker"]
Late = Literal["pass", "wait"]
ReadEarly = Callable[[int, Sequence[int]], None]
Recorded = Callable[[int, int], Ids]

Reason = Literal[
    "structural",
    "prefill",
    "first_token",
    "unranked",
    "unreadable",
    "fewer_rows",
    "late",
    "disarmed",
]

_PREDICTORS: dict[str, type[Inline] | type[Worker]] = {"inline": Inline, "worker": Worker}


@dataclass
class PredictionTimes:
    """What predicting has cost since the load, in seconds.

    Attributes:
        gemv_s: router products and rankings: a worker's CPU time, or the evaluation thread's time.
        issue_s: the evaluation thread handing over hidden vectors and early reads.
        wait_s: the evaluation thread waiting for rankings.
        watchdog_s: the same as gemv_s for the watchdog's products, and comparing.
    """

    gemv_s: float = 0.0
    issue_s: float = 0.0
    wait_s: float = 0.0
    watchdog_s: float = 0.0


class Consumer(Protocol):
    """What is done with rankings. `depth` in MoE layers; `serial` numbers the steps."""

    depth: int
    serial: int

    def next_step(self) -> None: ...

    def offer(self, serial: int, layer: int, ids: Ids) -> bool: ...

    def cannot_predict(self, layer: int, reason: Reason) -> None: ...


class Predictions:
    """Joins a ranker, a predictor and a policy. Belongs to the evaluation thread.

    Attributes:
        ranker: where rankings come from.
        watchdog: once it has disarmed, there are no more rankings.
        times: what predicting costs.
    """

    def __init__(
        self,
        model: Model,
        consumer: Consumer,
        *,
        compute: Compute,
        late: Late,
        precision: Precision,
        read_early: ReadEarly,
        recorded: Recorded | None = None,
        cold_share: float = 0.0,
    ) -> None:
        """
        Predicts for `consumer`, a policy of `model`.

        Args:
            read_early: called with a layer and the experts that were predicted, best first.
            recorded: (position, layer) → ids that take the place of every ranking (a forced run).
            cold_share: an expert whose predicted share of a routing is below this over top-k is
                going to be dropped if it is not resident, so that it is not read early; the top
                expert always is.
        """
        self._model, self._consumer, self._late = model, consumer, late
        self.ranker = model.ranker(precision)
        self.watchdog = Watchdog(len(model.layers))
        self.times = PredictionTimes()
        self._predictor = _PREDICTORS[compute](self._rank)
        self._read_early, self._recorded = read_early, recorded
        self._cold_share = cold_share
        self._asked: deque[Prediction] = deque()  # not yet collected, oldest first
        self._fresh: list[tuple[int, list[int]]] = []  # layers and experts to read for
        self._decoding = False
        self._position = 0

    @property
    def active(self) -> bool:
        """Whether hidden vectors are of use in this batch."""
        return self._decoding and self.watchdog.armed

    def begin(self, phase: Phase, position: int) -> None:
        """A batch begins; in decode, with the token at `position`."""
        self._decoding, self._position = phase == "decode", position
        self._forget()
        self._consumer.next_step()
        if self._decoding:
            self.ranker.prepare()

    def settle(self, routing: Routing) -> None:
        """A layer's router has chosen, and no policy has chosen otherwise yet."""
        if not self.active:
            return
        layer = routing.layer
        if self._asked:
            self._collect(layer, wait=self._late == "wait")
        if self.watchdog.wants() and routing.hidden is not None and layer in self.ranker:
            router, hidden = routing.ids[:1].copy(), routing.hidden[:1]
            self._submit(Prediction(self._consumer.serial, layer, hidden, router), layer)

    def predict(self, routing: Routing) -> None:
        """The same routing: what it says of the layer N further on."""
        if not self.active:
            return
        start, inline = time.perf_counter(), 0.0
        target = self._model.later(routing.layer, self._consumer.depth)
        if target is not None:
            if routing.hidden is None:
                self._consumer.cannot_predict(target, "unreadable")
            elif target not in self.ranker:
                seen = self.ranker.seen(target)
                self._consumer.cannot_predict(target, "unranked" if seen else "first_token")
            else:
                prediction = Prediction(self._consumer.serial, target, routing.hidden)
                self._submit(prediction, routing.layer)
                inline = prediction.spent_s if isinstance(self._predictor, Inline) else 0.0
        self.times.issue_s += max(0.0, time.perf_counter() - start - inline)

    def issue(self, layer: int) -> None:
        """The reads of `layer` are queued: those of the rankings that have arrived follow."""
        if not (self._asked or self._fresh):
            return
        start = time.perf_counter()
        if self._asked:
            self._collect(layer, wait=False)
        for target, experts in self._fresh:
            self._read_early(target, experts)
        self._fresh.clear()
        self.times.issue_s += time.perf_counter() - start

    def recover(self) -> None:
        """After a fault: no prediction of the void token is of use."""
        self._forget()
        self._consumer.next_step()

    def close(self) -> None:
        self._forget()
        self._predictor.close()

    # --- report ---

    def facts(self, decode: Totals) -> dict[str, Any]:
        """The watchdog's findings, and ms a decoded token (`PredictionTimes`)."""
        tokens, watchdog = decode.tokens or 1, self.watchdog
        seconds = {f.name: getattr(self.times, f.name) for f in fields(self.times)}
        seconds["adopt_s"] = decode.adopt_s
        return {
            "watched_slots": watchdog.slots,
            "reproduced_slots": watchdog.reproduced,
            "disarmed": watchdog.disarmed,
            **{f"{name[:-2]}_ms_per_tok": 1e3 * value / tokens for name, value in seconds.items()},
        }

    def lines(self, label: str, decode: Totals) -> list[str]:
        """What predicting cost, and whether it has been given up."""
        facts = self.facts(decode)
        gemv, issue, wait, adopt, watchdog = (
            f"{facts[f'{name}_ms_per_tok']:.2f}"
            for name in ("gemv", "issue", "wait", "adopt", "watchdog")
        )
        cost = (
            f"{label}-cost: ra_gemv_ms/tok {gemv}, ra_issue_ms/tok {issue}, waiting {wait}, "
            f"adopting {adopt}, watchdog {watchdog}"
        )
        disarmed = f"{label}: disarmed: {self.watchdog.disarmed}"
        return [cost, disarmed] if self.watchdog.disarmed else [cost]

    # --- inside ---

    def _forget(self) -> None:
        for prediction in self._asked:
            prediction.void = True
        self._asked.clear()
        self._fresh.clear()

    def _submit(self, prediction: Prediction, layer: int) -> None:
        """`layer` is the one that runs now."""
        self._predictor.submit(prediction)
        if isinstance(self._predictor, Inline):
            self._take(prediction, layer)
        else:
            self._asked.append(prediction)

    def _collect(self, layer: int, *, wait: bool) -> None:
        """Takes what the predictor has finished. `layer` is the one that runs now.

        Raises:
            BaseException: whatever a prediction met with.
        """
        while self._asked and (self._asked[0].done or (wait and self._asked[0].layer <= layer)):
            prediction = self._asked[0]
            if not prediction.done:
                start = time.perf_counter()
                prediction.wait()
                self.times.wait_s += time.perf_counter() - start
            self._asked.popleft()
            self._take(prediction, layer)
        for prediction in self._asked:
            if prediction.layer <= layer and prediction.router is None:
                prediction.void = True  # its layer goes on without it

    def _take(self, prediction: Prediction, layer: int) -> None:
        if prediction.error:
            raise prediction.error
        ids, target = prediction.ids, prediction.layer
        if prediction.router is not None:
            self._watch(prediction.router, ids, prediction.spent_s)
            return
        self.times.gemv_s += prediction.spent_s
        if ids is None or target < layer:
            return
        if self._recorded:
            places = range(self._position, self._position + len(ids))
            ids = np.stack([self._recorded(place, target) for place in places])
        if self._consumer.offer(prediction.serial, target, ids) and target > layer:
            self._fresh.append((target, self._worth_reading(target, ids, prediction)))

    def _worth_reading(self, layer: int, ids: Ids, prediction: Prediction) -> list[int]:
        """The experts of the rankings, each once and the rows' best first, less those that every
        row is going to drop unread."""
        if prediction.logits is None:
            return list(dict.fromkeys(ids.T.ravel().tolist()))
        rule, resident, wanted = self.ranker.rule(layer), self._model.experts.resident, []
        for row, logits in zip(ids, prediction.logits, strict=True):
            shares = rule.shares(logits, row).tolist()
            top, least = max(shares), self._cold_share / len(shares)
            wanted += [
                expert
                for expert, share in zip(row.tolist(), shares, strict=True)
                if share >= least or share == top or resident(layer, expert)
            ]
        return list(dict.fromkeys(wanted))

    def _rank(self, prediction: Prediction) -> Ids:
        """Runs on the predictor's thread."""
        layer, hidden = prediction.layer, prediction.hidden
        rule, logits = self.ranker.rule(layer), self.ranker.logits
        if self._cold_share:
            prediction.logits = np.stack([logits(layer, row).copy() for row in hidden])
            return np.stack([rule.select(row) for row in prediction.logits])
        if len(hidden) == 1:
            return rule.select(logits(layer, hidden[0]))[None]
        return np.stack([rule.select(logits(layer, row)) for row in hidden])

    def _watch(self, router: Ids, ids: Ids | None, spent_s: float) -> None:
        start = time.perf_counter()
        why = self.watchdog.watch(router[0], ids[0]) if ids is not None else ""
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
