"""A worker that computes predictions beside the evaluation thread.

Hand-overs between threads:

* `Prediction`: the evaluation thread makes it, with a copy of the hidden vectors, and from
  `submit` on only reads `done` and sets `void`. The worker writes `ids` and `probabilities`, or
  `error`, then `done`, then releases the prediction's lock; who finds `done`, or has acquired the
  lock in `wait`, may read the rest.
* `void` goes the other way: the evaluation thread sets it when nobody wants the prediction any
  more. The worker may see it too late and compute for nothing, which does no harm: a prediction
  carries the serial number of its step.
* A router product has buffers of its own and is used by one thread: the worker's, or the
  evaluation's.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from routeahead.types import Floats, Ids


class Prediction:
    """The ranking for one layer of one step, to be computed.

    Attributes:
        serial: number of the decode step.
        layer: number of the layer that it is for.
        hidden: float32 (rows, width), what it is made of.
        ids: int32 (rows, top_k), best first, once `done`.
        probabilities: float32 (rows, n_expert), see `Ranking`; None if nobody needs them later.
        error: what went wrong instead.
        spent_s: seconds of CPU time that it took.
        router: what the layer's own router chose on the same vectors, for the watchdog to compare;
            None if this is a prediction indeed.
    """

    __slots__ = (
        "_settled", "done", "error", "hidden", "ids", "layer", "probabilities", "router",
        "serial", "spent_s", "void",
    )  # fmt: skip

    def __init__(self, serial: int, layer: int, hidden: Floats, router: Ids | None = None) -> None:
        self.serial, self.layer, self.router = serial, layer, router
        self.hidden = hidden.copy()  # the graph goes on and reuses the memory
        self.ids: Ids | None = None
        self.probabilities: Floats | None = None
        self.error: BaseException | None = None
        self.spent_s = 0.0
        self.done = self.void = False
        self._settled = _thread.allocate_lock()  # held until done
        self._settled.acquire()

    def run(self, rank: Rank) -> None:
        start = time.thread_time()
        try:
            if not self.void:
                self.ids = rank(self)
        except BaseException as error:  # raised where the prediction is collected
            self.error = error
        self.spent_s = time.thread_time() - start
        self.done = True
        self._settled.release()

    def wait(self) -> None:
        with self._settled:
            pass


Rank = Callable[[Prediction], Ids]


class Worker:
    """Computes on a thread of its own, in the order asked."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._asked: SimpleQueue[Prediction | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="predictor", daemon=True)
        self._thread.start()

    def submit(self, prediction: Prediction) -> None:
        self._asked.put(prediction)

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while prediction := self._asked.get():
            prediction.run(self._rank)
