"""What is asked of predictions, and who asks: the terms between a policy and `Predictions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from routeahead.types import Floats, Ids

Compute = Literal["inline", "worker", "graph"]
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
    "spared",
]


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
    """What is done with rankings. `depth` in MoE layers, or HALF; `serial` numbers the steps."""

    depth: float
    serial: int

    def next_step(self) -> None: ...

    def offer(
        self, serial: int, layer: int, ids: Ids, probabilities: Floats | None = None
    ) -> bool: ...

    def rows(self, layer: int) -> int: ...

    def commits(self, layer: int) -> bool: ...

    def cannot_predict(self, layer: int, reason: Reason) -> None: ...
