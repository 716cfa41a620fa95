"""A model of the time that a machine takes to decode a recorded routing.

It has a thread that computes, lanes that read, and a disk. Which experts are missing is given
(`hits.replay` counts them), so a machine that is not at hand can be judged without the model file.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from routeahead.config import Settings
from routeahead.errors import SettingsError
from routeahead.telemetry.route_trace import RouteTrace, TraceError

PROJECTIONS = 3
"""Gate, up and down: each is a slice of its own, in a read of its own."""

_TOKENS = 32  # over which `simulate_rate` spreads misses that are no whole number


@dataclass(frozen=True)
class Machine:
    """A machine and how the engine is set on it.

    Attributes:
        bandwidth: bytes a second that all lanes get together.
        compute_s: seconds that one layer computes if it waits for nothing.
        latency_s: seconds that a read takes before its first byte.
        lanes: reads in flight at most.
        route_ahead: layers by which the routing is known ahead; 0 is the model's own routing.
        reads: that bring an expert: one for each projection, or one for all (of a packed file).
        overlap: a projection computes as soon as its own slices have arrived.
        expert_share: share of `compute_s` for the experts' projections, in equal parts; the rest
            comes before the top-k. A decoded token computes about as long as its weights take to
            be read from memory, so it is the experts' share of a layer's active bytes: 0.6 in
            Qwen3-30B-A3B at top-6.
    """

    bandwidth: float
    compute_s: float
    latency_s: float = 0.0001
    lanes: int = Settings.io_threads
    route_ahead: int = 0
    reads: int = PROJECTIONS
    overlap: bool = True
    expert_share: float = 0.6

    def validate(self) -> Machine:
        """Returns self.

        Raises:
            SettingsError: a value is out of range.
        """
        if not self.bandwidth > 0:
            raise SettingsError(f"bandwidth is {self.bandwidth}: give more than 0")
        for name in ("compute_s", "latency_s", "route_ahead"):
            if not getattr(self, name) >= 0:
                raise SettingsError(f"{name} is {getattr(self, name)}: give 0 or more")
        for name in ("lanes", "reads"):
            if not getattr(self, name) >= 1:
                raise SettingsError(f"{name} is {getattr(self, name)}: give 1 or more")
        if not 0 <= self.expert_share <= 1:
            raise SettingsError(f"expert_share is {self.expert_share}: give 0 to 1")
        return self


@dataclass(frozen=True)
class TimeModel:
    """Seconds a decoded token, on average.

    Attributes:
        token_s: from its start to its end.
        stall_s: waiting for bytes.
        io_s: in reads, summed over lanes; it overlaps with compute.
    """

    token_s: float
    stall_s: float
    io_s: float

    @property
    def compute_s(self) -> float:
        return self.token_s - self.stall_s


def simulate(trace: RouteTrace, misses_by_batch: Sequence[int], machine: Machine) -> TimeModel:
    """The time that decoding takes if as many experts of each batch are missing.

    A missing expert is `machine.reads` reads of equal size. They are demand reads, queued at the
    layer's own top-k, or with route-ahead N committed reads, queued at the top-k N layers before.
    The first N layers of a token read on demand. What reads take from compute is not modelled:
    measure `compute_s` while streaming.

    Args:
        misses_by_batch: for each batch of the trace, how many experts have to be read.

    Raises:
        SettingsError: a value of `machine` is out of range.
        TraceError: the trace decodes no token.
    """
    tokens = trace.decoded_tokens()
    if not tokens:
        raise TraceError("the trace has no decoded token: nothing to time")
    return _mean(
        [
            [_Layer(misses_by_batch[i], trace.expert_bytes[trace.batches[i].layer]) for i in token]
            for token in tokens
        ],
        machine,
    )


def simulate_rate(
    expert_bytes: Sequence[int], top_ks: Sequence[int], hit_rate: float, machine: Machine
) -> TimeModel:
    """The time of a token of which a share of the experts is in memory, spread evenly.

    Args:
        expert_bytes: of an expert of each layer.
        top_ks: experts that a token routes to in each layer.
        hit_rate: 0 to 1.

    Raises:
        SettingsError: a value of `machine` is out of range.
    """
    tokens, owed = list[list[_Layer]](), 0.0
    for _ in range(_TOKENS):
        layers = []
        for size, top_k in zip(expert_bytes, top_ks, strict=True):
            owed += (1 - hit_rate) * top_k
            misses = min(top_k, int(owed + 1e-9))
            owed -= misses
            layers.append(_Layer(misses, size))
        tokens.append(layers)
    return _mean(tokens, machine)


def _mean(tokens: Sequence[Sequence[_Layer]], machine: Machine) -> TimeModel:
    clock, count = _Clock(machine.validate()), len(tokens)
    for token in tokens:
        clock.decode(token)
    return TimeModel(clock.now / count, clock.stall_s / count, clock.lanes.busy_s / count)


@dataclass(frozen=True)
class _Layer:
    """What one layer of a token has to read: `misses` experts of `expert_bytes`."""

    misses: int
    expert_bytes: float


@dataclass
class _Slices:
    """What a layer is missing of one projection, or of all, if one read brings them."""

    remaining: int
    arrived_s: float = 0.0  # when the latest of them arrived


class _Lanes:
    """Lanes that share a disk: when each read begins, and when its bytes have arrived.

    A lane takes a read, waits for the latency, and then has the disk's whole bandwidth as soon as
    the reads begun before it have ended. So with one lane a read takes
    `latency + size / bandwidth`, and with more lanes the latency of one overlaps with the transfer
    of another.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free_at = [0.0] * machine.lanes  # a heap
        self._disk_free_at = 0.0
        self._demand: deque[tuple[_Slices, float]] = deque()
        self._committed: deque[tuple[_Slices, float]] = deque()
        self.busy_s = 0.0

    def submit(self, layer: _Layer, *, committed: bool) -> list[_Slices]:
        """Queues a layer's reads, projection by projection.

        Committed reads wait until no demand read is queued. They keep their place when their own
        layer needs them, because those of earlier layers have all begun by then.
        """
        parts = [_Slices(layer.misses) for _ in range(self._machine.reads)]
        queue = self._committed if committed else self._demand
        for slices in parts:
            queue.extend([(slices, layer.expert_bytes / len(parts))] * layer.misses)
        return parts

    def advance(self, now: float) -> None:
        """Begins all queued reads that begin before `now`; later submissions begin later."""
        while (self._demand or self._committed) and self._free_at[0] < now:
            self._begin()
        self._free_at = [max(free_at, now) for free_at in self._free_at]

    def wait(self, slices: _Slices) -> float:
        """When the last of `slices` arrives; 0 if there are none to read.

        The caller must submit nothing before then.
        """
        while slices.remaining:
            self._begin()
        return slices.arrived_s

    def _begin(self) -> None:
        slices, nbytes = (self._demand or self._committed).popleft()
        begun_at = heapq.heappop(self._free_at)
        sent_at = max(begun_at + self._machine.latency_s, self._disk_free_at)
        arrived_at = self._disk_free_at = sent_at + nbytes / self._machine.bandwidth
        heapq.heappush(self._free_at, arrived_at)
        self.busy_s += arrived_at - begun_at
        slices.remaining -= 1
        slices.arrived_s = arrived_at


class _Clock:
    """The thread that evaluates layers, one after the other.

    Attributes:
        now: seconds since the first token.
        stall_s: of those, waiting for bytes.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.lanes = _Lanes(machine)
        self.now = self.stall_s = 0.0

    def decode(self, layers: Sequence[_Layer]) -> None:
        """One token through all its layers."""
        experts_s = self._machine.compute_s * self._machine.expert_share
        ahead = self._machine.route_ahead
        reads: dict[int, list[_Slices]] = {}
        for index, layer in enumerate(layers):
            self.now += self._machine.compute_s - experts_s
            self.lanes.advance(self.now)
            if index < ahead or not ahead:
                reads[index] = self.lanes.submit(layer, committed=False)
            if ahead and index + ahead < len(layers):
                reads[index + ahead] = self.lanes.submit(layers[index + ahead], committed=True)
            self._compute(reads.pop(index), experts_s)

    def _compute(self, parts: Sequence[_Slices], experts_s: float) -> None:
        if not self._machine.overlap:
            for slices in parts:
                self._wait(slices)
            self.now += experts_s
            return
        for slices in parts:
            self._wait(slices)
            self.now += experts_s / len(parts)

    def _wait(self, slices: _Slices) -> None:
        stall_s = max(0.0, self.lanes.wait(slices) - self.now)
        self.stall_s += stall_s
        self.now += stall_s
