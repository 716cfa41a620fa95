"""Dropping leaves out what it should, and touches nothing that was not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support import models
from support.drop_reference import Dropping
from support.library import (
    PROMPTS,
    THREADS,
    Library,
    csv_rows,
    evaluate,
    token_batches,
    with_budget,
)
from support.readers import Delayed

from routeahead import Llama, SettingsError
from routeahead.policies.drop import DropCold
from routeahead.telemetry.io_trace import read_io_trace, report
from routeahead.telemetry.recorder import Outputs

Load = Callable[..., Llama]
Key = tuple[int, int]

SHARE = 0.15  # of the experts fits in the cache


def dropping(llm: Llama) -> DropCold:
    drop = llm.policies.find(DropCold)
    assert drop
    return drop


class Recorded:
    """The decoded part of a route trace: (position, layer) → arrays (top_k,)."""

    def __init__(self, path: Path) -> None:
        self.rows: dict[Key, list[dict[str, str]]] = {}
        for row in csv_rows(path):
            if row["phase"] == "1":
                self.rows.setdefault((int(row["step"]), int(row["layer"])), []).append(row)

    def column(self, key: Key, name: str) -> npt.NDArray[np.float64]:
        return np.array([float(row[name]) for row in self.rows[key]])

    def dropped(self) -> dict[Key, npt.NDArray[np.bool_]]:
        return {key: self.column(key, "dropped") == 1 for key in self.rows}


@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
@pytest.mark.parametrize(
    ("strength", "renorm"), [(0.75, True), (1.0, True), (1.0, False)], ids=["¾", "full", "plain"]
)
@pytest.mark.parametrize("name", models.FIXTURES)
def test_drops_by_share_and_computes_without(
    load: Load, library: Library, tmp_path: Path, name: str, renorm: bool, strength: float
) -> None:
    """Every slot is dropped or kept as its recorded weight and residency say, and the logits are
    those of a resident run in which the dropped ones weigh nothing."""
    path = tmp_path / "route.csv"
    llm = with_budget(
        load,
        name,
        SHARE,
        drop_cold_experts=strength,
        drop_renorm=renorm,
        poison=True,
        outputs=Outputs(route_trace=path),
    )
    logits = evaluate(llm, PROMPTS[0])
    drop = dropping(llm)
    assert 0 < drop.dropped < drop.slots
    top_k, layers = llm.layout.n_expert_used, len(llm.layout.moe_layers)
    assert drop.slots == top_k * layers * (len(PROMPTS[0]) - 1)
    llm.close()
    recorded, near = Recorded(path), 0
    for key in recorded.rows:
        weights, resident = recorded.column(key, "weight"), recorded.column(key, "residency")
        shares = weights / weights.sum()
        cold = (resident == 0) & (shares < strength / top_k) & (weights < weights.max())
        wrong = cold != (recorded.column(key, "dropped") == 1)
        assert np.all(np.abs(shares[wrong] - strength / top_k) < 1e-5)  # rounded in the trace
        near += int(wrong.sum())
        charged = recorded.column(key, "expert_bytes")
        assert not charged[recorded.column(key, "dropped") == 1].any()
    assert near <= 1
    assert sum(int(d.sum()) for d in recorded.dropped().values()) == drop.dropped
    reference = Dropping(library.path(name), recorded.dropped(), threads=THREADS, renorm=renorm)
    np.testing.assert_array_equal(reference.evaluate(PROMPTS[0]), logits)
    reference.close()
    assert not np.array_equal(logits, library.resident(name)[0])


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
@pytest.mark.parametrize("name", models.FIXTURES)
def test_an_inert_threshold_changes_nothing(load: Load, library: Library, name: str) -> None:
    llm = with_budget(load, name, SHARE, drop_cold_experts=1e-9, poison=True)
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    assert dropping(llm).dropped == 0 < dropping(llm).slots


@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2", "gpt-oss"])
def test_the_top_expert_survives(load: Load, name: str) -> None:
    """With one expert a token, its share is all, whatever F is."""
    llm = with_budget(load, name, SHARE, n_expert_used=1, drop_cold_experts=1.0, poison=True)
    plain = with_budget(load, name, SHARE, n_expert_used=1)
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), evaluate(plain, PROMPTS[0]))
    assert dropping(llm).dropped == 0


@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
@pytest.mark.parametrize(
    ("overlap", "in_prefill"), [(True, False), (False, True)], ids=["overlap", "serial-prefill"]
)
@pytest.mark.parametrize("name", models.FIXTURES)
def test_full_strength_touches_nothing_unread(
    load: Load, name: str, overlap: bool, in_prefill: bool
) -> None:
    """A cache that evicts all the time, in an arena where an unread page is a crash."""
    llm = with_budget(
        load,
        name,
        0.05,
        drop_cold_experts=1.0,
        drop_in_prefill=in_prefill,
        overlap=overlap,
        poison=True,
        wrap_reader=Delayed,
    )
    for batches in PROMPTS:
        assert np.isfinite(evaluate(llm, batches)).all()
    assert llm.source and llm.source.cache.evictions > 0
    assert dropping(llm).dropped > 0


def test_warns_where_every_expert_matters(load: Load) -> None:
    with pytest.warns(UserWarning, match="4 experts a token: each of them carries much"):
        with_budget(load, "qwen3moe", SHARE, drop_cold_experts=0.5)


# --- with route-ahead ---


@pytest.mark.filterwarnings("ignore:drop_cold_experts")
@pytest.mark.parametrize("compute", ["inline", "worker"])
@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2-grouped", "gemma4"])
def test_with_route_ahead(load: Load, name: str, compute: str) -> None:
    """Leaves nothing protected; computed inline, repeats byte for byte whatever lanes and delays
    do. (What a worker has read early in time to escape a drop depends on timing.)"""
    results = []
    ways = ({}, {"io_threads": 4, "wrap_reader": Delayed}, {"overlap": False})
    for settings in ways if compute == "inline" else ways[1:2]:
        llm = with_budget(
            load,
            name,
            SHARE,
            drop_cold_experts=0.7,
            route_ahead=2,
            route_ahead_compute=compute,
            poison=True,
            **settings,
        )
        results.append(np.concatenate([evaluate(llm, batches) for batches in PROMPTS]))
        assert dropping(llm).dropped > 0
        assert llm.source and llm.source.cache.protected == 0 and llm.source.prefetch.issued > 0
        assert llm.source.prefetch.useful == llm.source.prefetch.issued
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
def test_what_will_be_dropped_is_not_read_early(load: Load, tmp_path: Path) -> None:
    """Forced to one committed routing: bytes a token without early reads, with those that expect
    the drop, and with all of them."""
    trace, batches = tmp_path / "route.csv", token_batches(3, decode=100)
    llm = with_budget(load, "olmoe", SHARE, route_ahead=2, outputs=Outputs(route_trace=trace))
    evaluate(llm, batches)
    llm.close()
    found = {}
    for name, settings in {
        "off": {},
        "aware": {"route_ahead": 2},
        "unaware": {"route_ahead": 2, "drop_aware": False},
    }.items():
        path = tmp_path / f"{name}.csv"
        llm = with_budget(
            load,
            "olmoe",
            SHARE,
            drop_cold_experts=0.8,
            replay_routing=trace,
            outputs=Outputs(io_trace=path),
            **settings,
        )
        evaluate(llm, batches)
        llm.close()
        found[name] = report(read_io_trace(path)).decode_bytes
    assert found["off"] < found["unaware"]
    assert found["aware"] < found["unaware"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop_cold_experts": 1.5}, "drop_cold_experts is 1.5: give 0 to 1"),
        ({"drop_cold_experts": 0.5, "cache_mb": 0}, "cache_mb=0 keeps nothing"),
        ({"drop_in_prefill": True}, "drop_in_prefill has no effect without drop_cold_experts"),
        ({"drop_renorm": True}, "drop_renorm has no effect without drop_cold_experts"),
        ({"predict_spec_max": 1}, "predict_spec_max has no effect without predict_prefetch"),
        ({"router_precision": "f16"}, "without route_ahead or predict_prefetch"),
        ({"predict_prefetch": True, "route_ahead_late": "pass"}, "has no effect without route_a"),
        ({"predict_prefetch": True, "predict_spec_max": 0, "cache_mb": 0}, "keeps nothing"),
        ({"expert_substitute": -1.0}, "expert_substitute is -1.0: give 0 to 1"),
        ({"expert_substitute": 0.1, "cache_mb": 0}, "cache_mb=0 keeps nothing"),
        ({"prefetch": -1}, "prefetch is -1: it cannot be negative"),
        ({"route_ahead": 1, "prefetch": 1}, "route_ahead and prefetch exclude each other: a comm"),
        ({"route_ahead": 1, "predict_prefetch": True}, "exclude each other: a committed"),
        ({"route_ahead": 1, "predict_log": True}, "exclude each other: what it scores"),
        ({"route_ahead": 1, "expert_substitute": 0.1}, "a committed routing cannot be chosen"),
        ({"prefetch": 1, "predict_prefetch": True}, "one guess a layer"),
    ],
)
def test_settings_that_make_no_sense(load: Load, settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load("qwen3moe", **settings)
