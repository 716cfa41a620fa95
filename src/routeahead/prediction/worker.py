"""Who computes predictions: the evaluation thread itself, or a worker beside it.

Hand-overs between threads (worker only):

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
        spent_s: seconds it took: CPU time of a worker, wall time inline (there a system call with
            cold caches would cost as much as what is measured).
        router: what the layer's own router chose on the same vectors, for the watchdog to compare;
            None if this is a prediction indeed.
    """

    __slots__ = (
        "_settled", "done", "error", "hidden", "ids", "layer", "probabilities", "router",
        "serial", "spent_s", "void",
    )  # fmt: skip

    def __init__(self, serial: int, layer: int, hidden: Floats, router: Ids | None = None) -> None:
        self.serial, self.layer, self.hidden, self.router = serial, layer, hidden, router
        self.ids: Ids | None = None
        self.probabilities: Floats | None = None
        self.error: BaseException | None = None
        self.spent_s = 0.0
        self.done = self.void = False
        self._settled: _thread.LockType | None = None  # held until done, if another thread computes

    def run(self, rank: Rank, clock: Callable[[], float]) -> None:
        start = clock()
        try:
            if not self.void:
                self.ids = rank(self)
        except BaseException as error:  # raised where the prediction is collected
            self.error = error
        self.spent_s = clock() - start
        self.done = True
        if self._settled:
            self._settled.release()

    def hand_over(self) -> None:
        """Another thread is going to run it."""
        self.hidden = self.hidden.copy()  # the graph goes on and reuses the memory
        self._settled = _thread.allocate_lock()
        self._settled.acquire()

    def wait(self) -> None:
        if self._settled:
            with self._settled:
                pass


Rank = Callable[[Prediction], Ids]


class Inline:
    """Computes at once."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def submit(self, prediction: Prediction) -> None:
        prediction.run(self._rank, time.perf_counter)

    def close(self) -> None:
        pass


class Worker:
    """Computes on a thread of its own, in the order asked."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._asked: SimpleQueue[Prediction | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="predictor", daemon=True)
        self._thread.start()

    def submit(self, prediction: Prediction) -> None:
        prediction.hand_over()
        self._asked.put(prediction)

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while prediction := self._asked.get():
            prediction.run(self._rank, time.thread_time)
