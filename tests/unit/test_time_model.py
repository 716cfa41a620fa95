"""The time model of a replay: closed forms where there are any, and what must always hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.traces import decode_trace, random_trace

from routeahead.errors import SettingsError
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import ReplayResult, replay
from routeahead.replay.time_model import Machine, TimeModel, simulate
from routeahead.telemetry.route_trace import Batch, RouteTrace, TraceError

LAYERS, TOKENS, MISSES = 5, 3, 4
SLICE = 1.5  # seconds that one slice takes to transfer at a bandwidth of 10 bytes/s
LATENCY = 0.5
READ = LATENCY + SLICE


def uniform(misses: int = MISSES, **machine: Any) -> TimeModel:
    """`TOKENS` tokens through `LAYERS` layers that miss `misses` experts each."""
    trace = decode_trace([[list(range(MISSES))] * LAYERS] * TOKENS, [45] * LAYERS)
    settings = {"bandwidth": 10, "latency_s": LATENCY, "lanes": 1, "expert_share": 0.6, **machine}
    return simulate(trace, [misses] * (LAYERS * TOKENS), Machine(**settings))


def assert_times(times: TimeModel, *, token: float, stall: float, io: float) -> None:
    assert times.token_s == pytest.approx(token)
    assert times.stall_s == pytest.approx(stall)
    assert times.io_s == pytest.approx(io)
    assert times.compute_s == pytest.approx(token - stall)


@pytest.mark.parametrize("route_ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("overlap", [False, True])
def test_without_misses_a_token_is_its_compute(route_ahead: int, overlap: bool) -> None:
    times = uniform(0, compute_s=2.0, route_ahead=route_ahead, overlap=overlap)
    assert_times(times, token=LAYERS * 2.0, stall=0, io=0)


def test_without_overlap_a_layer_waits_for_all_its_reads() -> None:
    stall = LAYERS * 3 * MISSES * READ
    times = uniform(compute_s=2.0, overlap=False)
    assert_times(times, token=stall + LAYERS * 2.0, stall=stall, io=stall)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_expert_in_one_read_is_computed_when_it_is_there(overlap: bool) -> None:
    """As many bytes and a third of the latencies; nothing is left to hide a projection behind."""
    stall = LAYERS * MISSES * (LATENCY + 3 * SLICE)
    times = uniform(compute_s=10.0, reads=1, overlap=overlap)
    assert_times(times, token=stall + LAYERS * 10.0, stall=stall, io=stall)


def test_overlap_hides_two_projections_of_compute_behind_slow_reads() -> None:
    compute = 10.0  # of it 2 a projection, which is less than its slices take: 8
    reading = LAYERS * 3 * MISSES * READ
    stall = reading - LAYERS * 2 * 2.0
    times = uniform(compute_s=compute, overlap=True)
    assert_times(times, token=stall + LAYERS * compute, stall=stall, io=reading)


def test_overlap_hides_two_projections_of_fast_reads_behind_compute() -> None:
    compute = 50.0  # of it 10 a projection, which is more than its slices take: 8
    stall = LAYERS * MISSES * READ
    times = uniform(compute_s=compute, overlap=True)
    assert_times(times, token=stall + LAYERS * compute, stall=stall, io=3 * stall)


def test_lanes_share_the_bandwidth() -> None:
    reading = LAYERS * 3 * MISSES * SLICE
    for lanes in (1, 2, 3):
        times = uniform(compute_s=2.0, overlap=False, latency_s=0.0, lanes=lanes)
        assert times.stall_s == pytest.approx(reading)


def test_lanes_hide_latency_behind_transfers() -> None:
    stall = LAYERS * (LATENCY + 3 * MISSES * SLICE)
    times = uniform(compute_s=2.0, overlap=False, lanes=2)
    assert times.stall_s == pytest.approx(stall)


@pytest.mark.parametrize("lanes", [1, 2, 5, 12, 20])
def test_latencies_of_lanes_run_side_by_side(lanes: int) -> None:
    rounds = -(-3 * MISSES // lanes)
    stall = LAYERS * rounds * LATENCY
    times = uniform(compute_s=2.0, overlap=False, bandwidth=float("inf"), lanes=lanes)
    assert_times(times, token=stall + LAYERS * 2.0, stall=stall, io=LAYERS * 3 * MISSES * LATENCY)


def test_route_ahead_hides_reads_that_fit_into_a_layer() -> None:
    reading = 3 * MISSES * READ  # 24 s, for the first layer on demand
    times = uniform(compute_s=reading, overlap=False, route_ahead=1)
    assert_times(times, token=(LAYERS + 1) * reading, stall=reading, io=LAYERS * reading)


def test_route_ahead_hides_compute_where_reads_are_longer() -> None:
    reading, compute = 3 * MISSES * READ, 20.0  # the disk is never idle after the first top-k
    times = uniform(compute_s=compute, overlap=False, route_ahead=1)
    token = 0.4 * compute + LAYERS * reading + 0.6 * compute
    assert_times(times, token=token, stall=token - LAYERS * compute, io=LAYERS * reading)


def test_demand_reads_overtake_committed_ones() -> None:
    """Reads of 1 s. Layer 2's are committed at 0.2; one is in flight at layer 1's top-k, 0.7.

    It ends at 1.2, then come layer 1's three until 4.2, which computes until 4.5. Layer 2's
    other two end at 6.2, and it computes 0.3.
    """
    trace = decode_trace([[[0], [0], [0]]], [30, 30, 30])
    machine = Machine(
        bandwidth=float("inf"),
        latency_s=1.0,
        compute_s=0.5,
        lanes=1,
        route_ahead=2,
        overlap=False,
        expert_share=0.6,
    )
    assert_times(simulate(trace, [0, 1, 1], machine), token=6.5, stall=5.0, io=6.0)


def test_route_ahead_does_not_cross_tokens() -> None:
    """With a depth beyond the last layer every layer reads on demand."""
    assert uniform(compute_s=2.0, route_ahead=LAYERS) == uniform(compute_s=2.0)


Cell = tuple[RouteTrace, ReplayResult, Machine]


def grid() -> Iterator[Cell]:
    for seed, lanes, ahead, overlap in product(range(6), (1, 2, 4), (0, 1), (False, True)):
        trace = random_trace(seed, sizes=[30, 60, 30, 45], tokens=10)
        machine = Machine(
            bandwidth=100.0,
            compute_s=0.4,
            latency_s=0.05,
            lanes=lanes,
            route_ahead=ahead,
            overlap=overlap,
        )
        yield trace, replay(trace, 300, Policy.LRU), machine


def times_of(cell: Cell, **changed: Any) -> TimeModel:
    trace, result, machine = cell
    return simulate(trace, result.misses_by_batch, replace(machine, **changed))


def test_bounds_of_a_token() -> None:
    """Compute is all there; neither the disk nor a lane does two things at once."""
    for cell in grid():
        _, result, machine = cell
        times = times_of(cell)
        transfer = result.bytes_per_token / machine.bandwidth
        latency = 3 * result.misses / result.tokens * machine.latency_s
        assert times.compute_s == pytest.approx(4 * machine.compute_s)
        assert 0 < times.stall_s < transfer + latency + 1e-9
        assert times.token_s > transfer
        assert transfer + latency - 1e-9 < times.io_s < machine.lanes * times.token_s


@pytest.mark.parametrize(
    "better",
    [
        {"bandwidth": 150.0},
        {"bandwidth": 1000.0},
        {"latency_s": 0.01},
        {"compute_s": 0.2},
        {"lanes": 8},
        {"overlap": True},
        {"route_ahead": 1},
    ],
)
def test_nothing_better_makes_a_token_slower(better: dict[str, Any]) -> None:
    gains = [times_of(cell).token_s - times_of(cell, **better).token_s for cell in grid()]
    assert min(gains) > -1e-9
    assert max(gains) > 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"bandwidth": 0},
        {"bandwidth": float("nan")},
        {"compute_s": -1.0},
        {"latency_s": -1.0},
        {"route_ahead": -1},
        {"lanes": 0},
        {"expert_share": 1.5},
    ],
)
def test_a_machine_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        uniform(**{"compute_s": 1.0, **wrong})


def test_a_trace_without_decode_is_refused() -> None:
    prompt = RouteTrace({0: 10}, [Batch("prefill", 0, 0, (1,))])
    with pytest.raises(TraceError, match="no decoded token"):
        simulate(prompt, [1], Machine(bandwidth=1, compute_s=1))
