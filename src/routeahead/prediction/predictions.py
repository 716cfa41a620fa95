"""Predictions by routers: hidden vectors in, rankings and early reads out.

Route-ahead commits what is predicted here, predicted prefetch only reads it. In a layer's hooks, in
this order (`routing.policy`):

1. `settle`, in `routed`: rankings that have arrived are handed to the policy; with late="wait" the
   one for this very layer is waited for. The watchdog looks at the router's choice. With
   compute="graph" the graph itself may have ranked the experts of the layer N further on
   (`llamacpp/lending.py`): that ranking is taken over.
2. `predict`: otherwise the hidden vectors are given to the predictor, for the layer N further on.
   With compute="graph" it is decided whether the next layer lends its router.
3. `issue`, in `issued` and `product`: the experts of every ranking that has arrived are read early.

At a depth of HALF, `approach` comes before all of them, in `before_attention`: what the layer's
attention is given is ranked for that layer, and read.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from typing import Any

import numpy as np

from routeahead.prediction.consumer import (
    Compute,
    Consumer,
    Late,
    PredictionTimes,
    ReadEarly,
    Reason,
    Recorded,
)
from routeahead.prediction.watchdog import Watchdog
from routeahead.prediction.worker import Prediction, Worker
from routeahead.routing.policy import HALF, Model, Precision, Ranking, Routing
from routeahead.telemetry.counters import Totals
from routeahead.types import Floats, Ids, Phase

_NO_LAYER = -1  # before all layers


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
        skip: int = 0,
        weighing: bool = False,
        more: int | None = None,
    ) -> None:
        """
        Predicts for `consumer`, a policy of `model`.

        Args:
            read_early: called with a layer and the experts that were predicted, best first.
            recorded: (position, layer) → ids that take the place of every ranking (a forced run).
            cold_share: an expert whose predicted share of a routing is below this over top-k is
                going to be dropped if it is not resident, so that it is not read early; the top
                expert always is.
            skip: MoE layers at the beginning from which nothing is predicted.
            weighing: a ranking's probabilities are wanted with its ids.
            more: experts of a ranking beyond those that a layer uses, or fewer, if negative. Unless
                it is None, something chooses among them by what the cache has, so with late="wait"
                early reads come in the same order however fast a worker is.
        """
        self._model, self._consumer, self._late = model, consumer, late
        self.ranker = model.ranker(precision)
        self.watchdog = Watchdog(len(model.layers))
        self.times = PredictionTimes()
        # In a layer whose router is not lent, "graph" computes as "inline" does.
        self._predictor = Worker(self._work) if compute == "worker" else None
        self._lends, self._weighing = compute == "graph", weighing
        self._more = more or 0
        self._steady = more is not None and late == "wait"
        self._skipped = frozenset(model.layers[:skip])
        # Layer → the one that is predicted from it, None if there is none; and the next in a token.
        self._targets = {layer: self._target(layer) for layer in model.layers}
        self._following = dict(zip(model.layers, [*model.layers[1:], model.layers[0]], strict=True))
        self._ready: set[int] = set()  # what can be predicted
        self._keeps = weighing or bool(cold_share)  # probabilities
        self._lender: int | None = None  # the next layer, if its router is lent
        self._refused: set[int] = set()  # layers whose routers turned out not to be lent
        self.sampled = False  # whether the watchdog looks at the next layer's routing
        self._read_early, self._recorded = read_early, recorded
        self._cold_share = cold_share
        self._asked: deque[Prediction] = deque()  # not yet collected, oldest first
        self._fresh: list[tuple[int, list[int]]] = []  # layers and experts to read for
        self._decoding = False
        self._position = 0

    @property
    def active(self) -> bool:
        """Whether hidden vectors are of use in this batch."""
        return self._decoding and not self.watchdog.disarmed

    def begin(self, phase: Phase, position: int) -> None:
        """A batch begins; in decode, with the token at `position`."""
        self._decoding, self._position = phase == "decode", position
        self._forget()
        self._consumer.next_step()
        if self._decoding:
            self.ranker.prepare()
            self._arrange(self._model.layers[0])

    def _arrange(self, layer: int) -> None:
        """`layer` is routed next: is it watched, and does it lend its router?

        Its own experts must be known by then, and the watchdog wants the router's own choice.
        """
        self._lender = None
        self.sampled = self.watchdog.wants()
        if not self._lends or self.sampled or self._consumer.rows(layer) != 1:
            return  # a product of several rows may be computed by another kernel
        target = self._targets[layer] if self._consumer.commits(layer) else None
        if target is None or target not in self.ranker or layer in self._refused:
            return
        if self.ranker.lend(layer, target, hidden=not self._weighing):
            self._lender = layer

    def _target(self, layer: int) -> int | None:
        """The layer that is predicted from `layer`; None if there is none."""
        if layer in self._skipped or self._consumer.depth == HALF:
            return None
        return self._model.later(layer, int(self._consumer.depth))

    def approach(self, layer: int, hidden: Floats) -> None:
        """`hidden` (rows, width) is what the attention of `layer` is given: at a depth of HALF,
        what it says of the layer's experts is read before the attention runs."""
        if not self.active or layer in self._skipped:
            return
        start, computed = time.perf_counter(), self.times.gemv_s
        self._ask(layer, hidden, before := layer - 1)
        self.times.issue_s += time.perf_counter() - start - (self.times.gemv_s - computed)
        self.issue(before)

    def settle(self, routing: Routing) -> None:
        """A layer's router has chosen, and no policy has chosen otherwise yet."""
        if not self.active:
            return
        layer = routing.layer
        if self._asked:
            awaited = layer if self._late == "wait" else _NO_LAYER
            self._collect(layer, until=self._model.layers[-1] if self._steady else awaited)
        if routing.ranked_for is not None:
            self._borrow(routing, routing.ranked_for)
        elif layer == self._lender:
            self._refused.add(layer)
        if self.sampled and routing.hidden is not None and layer in self.ranker:
            router, hidden = routing.ids[:1].copy(), routing.hidden[:1]
            if self._predictor:
                self._hand_over(Prediction(self._consumer.serial, layer, hidden, router))
            else:
                start = time.perf_counter()
                self._watch(router, self.ranker.rank(layer, hidden[0]))
                self.times.watchdog_s += time.perf_counter() - start

    def predict(self, routing: Routing) -> None:
        """The same routing: what it says of the layer N further on."""
        if not self._decoding or self.watchdog.disarmed:
            return
        start, computed, layer = time.perf_counter(), self.times.gemv_s, routing.layer
        target = self._targets[layer]
        if target is not None and routing.ranked_for is None:
            self._ask(target, routing.hidden, layer)
        if self._lends:
            self._arrange(self._following[layer])
        else:
            self.sampled = self.watchdog.wants()
        self.times.issue_s += time.perf_counter() - start - (self.times.gemv_s - computed)

    def issue(self, layer: int) -> None:
        """The reads of `layer` are queued: those of the rankings that have arrived follow."""
        if not (self._asked or self._fresh):
            return
        start, waited = time.perf_counter(), self.times.wait_s
        if self._asked:
            following = self._steady and self._consumer.depth == 1  # what is asked is next
            self._collect(layer, until=self._model.layers[-1] if following else _NO_LAYER)
        for target, experts in self._fresh:
            self._read_early(target, experts)
        self._fresh.clear()
        self.times.issue_s += time.perf_counter() - start - (self.times.wait_s - waited)

    def compares(self, routing: Routing) -> bool:
        """Whether the router's own choice, which is in the routing, counts for agreement. In graph
        mode only where it was sampled: the last layers, which never lend, would count for more."""
        return self.sampled or not self._lends

    def weigh(self, routing: Routing, ranking: Ranking) -> None:
        """The routing's experts were chosen by the `ranking`: gives them its weights, if those are
        wanted, or the layer's own router's, if it was lent."""
        probabilities = ranking.probabilities if self._weighing else None
        if not self._weighing and routing.ranked_for is not None:
            assert routing.hidden is not None  # `_arrange` has asked for it
            start = time.perf_counter()
            own = self.ranker.own(routing.layer, routing.hidden[0])
            probabilities = None if own is None else own[None]
            self.times.gemv_s += time.perf_counter() - start
        if probabilities is not None:
            routing.weigh_by(probabilities)

    def recover(self) -> None:
        """After a fault: no prediction of the void token is of use."""
        self._forget()
        self._consumer.next_step()

    def close(self) -> None:
        self._forget()
        if self._predictor:
            self._predictor.close()

    # --- report ---

    def facts(self, decode: Totals) -> dict[str, Any]:
        """The watchdog's findings, and ms a decoded token (`PredictionTimes`)."""
        names = ("gemv_s", "issue_s", "wait_s", "watchdog_s", "adopt_s")
        return {
            "watched_slots": self.watchdog.slots,
            "reproduced_slots": self.watchdog.reproduced,
            "disarmed": self.watchdog.disarmed,
            "convert_s": self.ranker.convert_s,
            **{f"{name[:-2]}_ms_per_tok": 1e3 * decode.per_token(name) for name in names},
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

    def _borrow(self, routing: Routing, target: int) -> None:
        """The graph has ranked the experts of `target`."""
        probabilities = routing.probabilities() if self._keeps else None
        serial = self._consumer.serial
        self._offer(serial, target, routing.ids.copy(), probabilities, routing.layer)

    def _unpredictable(self, layer: int) -> Reason | None:
        """Why what is wanted of the layer's router is not known; once it is, it stays so."""
        if not self.ranker.seen(layer):
            return "first_token"
        if layer not in self.ranker:
            return "unranked"
        if self._weighing and self.ranker.rule(layer).weighing is None:
            return "unranked"
        self._ready.add(layer)
        return None

    def _ask(self, target: int, hidden: Floats | None, layer: int) -> None:
        """Has the `target` predicted, or tells why not; `layer` is the one that runs now."""
        obstacle = None if target in self._ready else self._unpredictable(target)
        if obstacle:
            self._consumer.cannot_predict(target, obstacle)
        elif hidden is None:
            self._consumer.cannot_predict(target, "unreadable")
        elif self._predictor:
            self._hand_over(Prediction(self._consumer.serial, target, hidden))
        else:
            start = time.perf_counter()
            ids, probabilities = self._rank(target, hidden)
            self.times.gemv_s += time.perf_counter() - start
            self._offer(self._consumer.serial, target, ids, probabilities, layer)

    def _hand_over(self, prediction: Prediction) -> None:
        assert self._predictor
        self._predictor.submit(prediction)
        self._asked.append(prediction)

    def _collect(self, layer: int, *, until: int) -> None:
        """Takes the predictions for layers up to `until`, which are waited for, and, unless reads
        must come in the same order always, what is finished. `layer` is the one that runs now.

        Raises:
            BaseException: whatever a prediction met with.
        """
        while self._asked:
            prediction = self._asked[0]
            if prediction.layer > until and (self._steady or not prediction.done):
                break
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
        ids = prediction.ids
        if prediction.router is not None:
            start = time.perf_counter()
            if ids is not None:
                self._watch(prediction.router, ids[0])
            self.times.watchdog_s += prediction.spent_s + time.perf_counter() - start
            return
        self.times.gemv_s += prediction.spent_s
        if ids is not None and prediction.layer >= layer:
            self._offer(prediction.serial, prediction.layer, ids, prediction.probabilities, layer)

    def _offer(
        self, serial: int, target: int, ids: Ids, probabilities: Floats | None, layer: int
    ) -> None:
        """Rankings (rows, top_k) for `target`; `layer` is the one that runs now."""
        if self._recorded:
            recorded = [self._recorded(self._position + n, target) for n in range(len(ids))]
            ids = np.stack(recorded) if len(recorded) > 1 else recorded[0][None]
        if not self._consumer.offer(serial, target, ids, probabilities) or target <= layer:
            return
        if len(ids) == 1 and not self._cold_share:
            self._fresh.append((target, ids[0].tolist()))
        else:
            self._fresh.append((target, self._worth_reading(target, ids, probabilities)))

    def _worth_reading(self, layer: int, ids: Ids, weighed: Floats | None) -> list[int]:
        """The experts of the rankings, each once and the rows' best first, less those that every
        row is going to drop unread."""
        if not self._cold_share or weighed is None:
            return list(dict.fromkeys(ids.T.ravel().tolist()))
        rule, resident, wanted = self.ranker.rule(layer), self._model.experts.resident, []
        for row, probabilities in zip(ids, weighed, strict=True):
            shares = rule.shares(probabilities, row).tolist()
            top, least = max(shares), self._cold_share / len(shares)
            wanted += [
                expert
                for expert, share in zip(row.tolist(), shares, strict=True)
                if share >= least or share == top or resident(layer, expert)
            ]
        return list(dict.fromkeys(wanted))

    def _work(self, prediction: Prediction) -> Ids:
        """Runs on the worker."""
        layer, hidden = prediction.layer, prediction.hidden
        if prediction.router is not None:
            return self.ranker.rank(layer, hidden[0])[None]
        ids, prediction.probabilities = self._rank(layer, hidden)
        return ids

    def _rank(self, layer: int, hidden: Floats) -> tuple[Ids, Floats | None]:
        """Rankings (rows, top_k), and their probabilities if those are kept."""
        if not self._keeps:
            if len(hidden) == 1:
                return self.ranker.best(layer, hidden[0], self._more)[None], None
            return np.array([self.ranker.best(layer, row, self._more) for row in hidden]), None
        rows: list[Ids] = []
        kept: list[Floats] = []
        for row in hidden:
            ids, probabilities = self.ranker.predict(layer, row, self._more)
            rows.append(ids)
            if probabilities is not None:
                kept.append(probabilities.copy())
        return np.array(rows), np.array(kept) if kept else None

    def _watch(self, router: Ids, ids: Ids) -> None:
        why = self.watchdog.watch(router[0], ids)
        if why:
            self._disarm(why)

    def _disarm(self, why: str) -> None:
        self._forget()
        warnings.warn(
            f"predictions have disarmed themselves: {why}; from here on every routing is the "
            "router's own, and read when it is known, until the model is closed",
            stacklevel=2,
        )
