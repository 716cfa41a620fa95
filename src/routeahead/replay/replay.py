"""Replays a routing trace through a cache, and tells how long a machine would take over it.

Both answer, in seconds and without the model, what a setting would do on a machine that is not
here. `replay` is exact: it makes the engine's lookups. `simulate` is a model: a thread that
computes, lanes that read, and a disk.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from routeahead.config import Settings
from routeahead.errors import SettingsError
from routeahead.replay.eviction import Policy, make_cache
from routeahead.telemetry.route_trace import RouteTrace, TraceError

PROJECTIONS = 3
"""Gate, up, down: each is a slice of its own, read on its own."""


@dataclass(frozen=True)
class ReplayResult:
    """What a cache made of a trace. Totals are of decode; prefill only fills the cache.

    Attributes:
        budget: bytes.
        tokens: decoded tokens.
        evictions: entries dropped, by the lookup that dropped them.
        bytes_read: bytes of the experts that were missing.
        misses_by_batch: experts that were missing, for each batch of the trace, prefill included.
    """

    policy: Policy
    budget: int
    tokens: int
    hits: int
    misses: int
    evictions: int
    bytes_read: int
    misses_by_batch: Sequence[int] = field(repr=False)

    @property
    def hit_rate(self) -> float:
        """Part of the decode lookups that found their expert in memory, 0 to 1."""
        return self.hits / (self.hits + self.misses)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / self.tokens


def replay(trace: RouteTrace, budget: int, policy: Policy) -> ReplayResult:
    """Sends all batches of `trace` through a cache of `budget` bytes.

    Raises:
        SettingsError: the budget is negative.
        TraceError: the trace decodes no token.
    """
    if budget < 0:
        raise SettingsError(f"cache of {budget} bytes: give a size of 0 or more")
    tokens = len(trace.decoded_tokens())
    if not tokens:
        raise TraceError("the trace has no decoded token: nothing to count")
    cache = make_cache(policy, budget, trace)
    misses_by_batch: list[int] = []
    lookups = misses = evictions = bytes_read = 0
    for batch in trace.batches:
        outcome = cache.lookup(batch.layer, batch.experts)
        missing = len(outcome.misses)
        misses_by_batch.append(missing)
        if batch.phase == "decode":
            lookups += len(batch.experts)
            misses += missing
            evictions += len(outcome.victims)
            bytes_read += missing * trace.expert_bytes[batch.layer]
    return ReplayResult(
        policy, budget, tokens, lookups - misses, misses, evictions, bytes_read, misses_by_batch
    )


@dataclass(frozen=True)
class Machine:
    """A machine and how the engine is set on it.

    Attributes:
        bandwidth: bytes a second that all lanes get together.
        compute_s: seconds that one layer computes when it waits for nothing.
        latency_s: seconds that a read takes before its bytes flow.
        lanes: reads in flight at most.
        route_ahead: layers by which the routing is known ahead; 0 is the model's own routing.
        overlap: a projection computes as soon as its own slices are in.
        expert_share: part of `compute_s` that is expert projections, equal ones; the rest comes
            before the top-k. A decoded token computes about as long as its weights take to be
            read from memory, so it is the experts' part of a layer's active bytes: 0.6 in
            Qwen3-30B-A3B at top-6.
    """

    bandwidth: float
    compute_s: float
    latency_s: float = 0.0001
    lanes: int = Settings.io_threads
    route_ahead: int = 0
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
        if self.lanes < 1:
            raise SettingsError(f"lanes is {self.lanes}: give 1 or more")
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
    """How long decoding takes when those of each batch's experts are missing.

    An expert that is missing is `PROJECTIONS` reads of equal size. They are demand reads, asked
    for at the layer's own top-k, or with route-ahead N committed reads, asked for at the top-k of N
    layers before; the first N layers of a token have nothing before them and read on demand.
    Nothing is modelled of what reads take from compute: measure `compute_s` while streaming.

    Args:
        misses_by_batch: for each batch of the trace, how many experts had to be read.

    Raises:
        SettingsError: a value of `machine` is out of range.
        TraceError: the trace decodes no token.
    """
    clock = _Clock(machine.validate())
    tokens = trace.decoded_tokens()
    if not tokens:
        raise TraceError("the trace has no decoded token: nothing to time")
    for token in tokens:
        clock.decode(
            [
                _Layer(misses_by_batch[i], trace.expert_bytes[trace.batches[i].layer] / PROJECTIONS)
                for i in token
            ]
        )
    count = len(tokens)
    return TimeModel(clock.now / count, clock.stall_s / count, clock.lanes.busy_s / count)


@dataclass(frozen=True)
class _Layer:
    """What a layer of a token has to read: `misses` slices of each projection."""

    misses: int
    slice_bytes: float


@dataclass
class _Slices:
    """The slices of one projection that a layer is missing."""

    remaining: int
    arrived_s: float = 0.0  # when the latest of them came in


class _Lanes:
    """Lanes that share a disk: which read begins when, and when its bytes are in.

    A lane takes a read, waits the latency out, then has the disk's whole bandwidth to itself as
    soon as the reads begun before it are through. So `latency + size / bandwidth` is the time of a
    read at one lane, and with more lanes latencies hide behind transfers.
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

        Committed reads wait until no demand read is queued. When their own layer needs them they
        need no second place in the queue: those of earlier layers have all begun by then.
        """
        projections = [_Slices(layer.misses) for _ in range(PROJECTIONS)]
        queue = self._committed if committed else self._demand
        for slices in projections:
            queue.extend([(slices, layer.slice_bytes)] * layer.misses)
        return projections

    def advance(self, now: float) -> None:
        """Begins all queued reads that begin before `now`; whatever is submitted next is later."""
        while (self._demand or self._committed) and self._free_at[0] < now:
            self._begin()
        self._free_at = [max(free_at, now) for free_at in self._free_at]

    def wait(self, slices: _Slices) -> float:
        """When the last of `slices` is in; 0 where there were none to read.

        Only for a caller that submits nothing before then.
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

    def _compute(self, projections: Sequence[_Slices], experts_s: float) -> None:
        if not self._machine.overlap:
            for slices in projections:
                self._wait(slices)
            self.now += experts_s
            return
        for slices in projections:
            self._wait(slices)
            self.now += experts_s / PROJECTIONS

    def _wait(self, slices: _Slices) -> None:
        stall_s = max(0.0, self.lanes.wait(slices) - self.now)
        self.stall_s += stall_s
        self.now += stall_s
