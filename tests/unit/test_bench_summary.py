"""Figures and ratios of a benchmark's runs."""

from __future__ import annotations

import pytest

from routeahead.bench.runs import Run
from routeahead.bench.statistics import Ratio
from routeahead.bench.summary import figures, summarise
from routeahead.experts.layout import MIB


def make_run(cell: str, index: int, **step: float) -> Run:
    steps = {name: [value] for name, value in ({"wall_s": 0.01} | step).items()}
    return Run(cell, index, 0, [], {}, {}, 1.0, 0.0, 0, {}, "", {"decode_steps": steps})


def test_figures_of_a_report() -> None:
    steps = {
        "wall_s": [9.0, 0.04, 0.06],
        "compute_s": [1.0, 0.02, 0.04],
        "stall_s": [7.0, 0.015, 0.015],
        "adopt_s": [0.0, 0.004, 0.004],
        "mgmt_s": [1.0, 0.005, 0.005],
        "bytes_read": [99 * MIB, 5 * MIB, 15 * MIB],
        "hits": [0, 30, 30],
        "misses": [40, 4, 16],
        "cpu_s": [0.0, 0.0, 0.0],
    }
    assert figures({"decode_steps": steps}, warmup=1) == pytest.approx(
        {
            "tok_per_s": 20,
            "ms": 50,
            "compute_ms": 30,
            "stall_ms": 15,
            "adopt_ms": 4,
            "mgmt_ms": 5,
            "mib_per_token": 10,
            "mib_per_s": 200,
            "hit_rate": 0.75,
            "miss_rate": 0.25,
        }
    )
    assert figures({"decode_steps": steps}, warmup=0)["ms"] == pytest.approx(9100 / 3)
    assert figures({"decode_steps": {"wall_s": [0.5]}}, warmup=0) == {"tok_per_s": 2, "ms": 500}


def test_pairs_are_of_one_pass() -> None:
    """The machine slows down from pass to pass; pass 2 lacks one of the pair."""
    times = {0: 0.01, 1: 0.02, 2: 0.04, 3: 0.08}
    runs = [make_run("a", index, wall_s=s) for index, s in times.items()]
    runs += [make_run("b", index, wall_s=s / 2) for index, s in times.items() if index != 2]
    a, b = summarise(runs, ["a", "b"], "a", warmup=0)
    assert a.ratios == {} and a.as_dict()["verdict"] is None
    speed = b.ratios["tok_per_s"]
    assert isinstance(speed, Ratio)
    assert (speed.pairs, speed.median) == (3, pytest.approx(2)) and speed.low is None


@pytest.mark.parametrize(
    ("misses", "shown"), [(1, True), (0.5, False), (0, False)], ids=["1%", "half", "none"]
)
def test_ratios_of_what_misses_cost_need_misses(misses: float, shown: bool) -> None:
    many = {"hits": 80, "misses": 20, "stall_s": 0.002}
    few = {"hits": 100 - misses, "misses": misses, "stall_s": 0.001}
    runs = [make_run("a", index, **many) for index in range(3)]
    runs += [make_run("b", index, **few) for index in range(3)]
    _, b = summarise(runs, ["a", "b"], "a", warmup=0)
    stall, hits = b.ratios["stall_ms"], b.ratios["hit_rate"]
    if shown:
        assert isinstance(stall, Ratio) and stall.median == pytest.approx(0.5)
        assert isinstance(hits, Ratio) and hits.median == pytest.approx(0.99 / 0.8)
    else:
        assert stall == hits == "missed < 1%"
    assert isinstance(b.ratios["tok_per_s"], Ratio)


def test_a_program_that_counts_no_misses() -> None:
    """Plain llama.cpp reports less: what is not there is not compared."""
    runs = [make_run("a", 0, hits=1, misses=1, stall_s=0.1, bytes_read=5)]
    runs.append(make_run("b", 0, bytes_read=5))
    _, b = summarise(runs, ["a", "b"], "a", warmup=0)
    assert isinstance(b.ratios["tok_per_s"], Ratio)
    assert b.ratios["stall_ms"] == b.ratios["compute_ms"] == "not counted"
    assert b.ratios["mib_per_token"] == "no misses counted"
