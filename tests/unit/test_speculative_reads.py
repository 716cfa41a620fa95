"""The simulation of speculative reads is that of `replay`, and guesses beside it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from routeahead.experts.layout import MIB
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import replay
from routeahead.replay.time_model import Machine, simulate
from routeahead.telemetry.route_trace import read_trace

ROOT = Path(__file__).parents[2]


def test_without_guesses_it_is_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    simulation = importlib.import_module("speculative_reads")
    trace = read_trace(ROOT / "tests/data/routing/qwen3-30b-a3b.csv").first_layers(8)
    machine, budget = Machine(1200 * MIB, 0.0015), 200 * MIB
    misses = replay(trace, budget, Policy.DECAY).misses_by_batch
    times = simulate(trace, misses, machine)

    def decoding(guesser: str, least: float) -> tuple[float, float, float]:
        found = simulation.Decoding(trace, budget, machine, guesser, least, 1, 4).run()
        return found.now / found.tokens, found.useful, found.wasted

    assert decoding("nothing", 0.0) == (pytest.approx(times.token_s), 0, 0)
    best, useful, wasted = decoding("oracle", 1.0)
    assert best < times.token_s and useful > 0 == wasted
    assert decoding("followers", 0.1)[2] > 0
