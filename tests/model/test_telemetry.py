"""Traces agree with the counters, with each other and with a reference cache; off costs nothing."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from support.library import PROMPTS, Library, csv_facts, csv_rows, evaluate, token_batches
from support.reference import Resident

from routeahead import Llama, SettingsError
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import replay
from routeahead.telemetry.io_trace import read_io_trace, report
from routeahead.telemetry.recorder import Outputs
from routeahead.telemetry.route_trace import read_trace

Load = Callable[..., Llama]

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_io_trace_bytes_are_the_counters(load: Load, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"io.{suffix}"
    llm = load("mixed", cache_mb=0, outputs=Outputs(io_trace=path))
    for batches in PROMPTS:
        evaluate(llm, batches)
    prefill, decode, tokens = llm.counters.prefill, llm.counters.decode, llm.counters.decode.tokens
    llm.close()
    figures = report(read_io_trace(path))
    assert figures.bytes_read == prefill.bytes_read + decode.bytes_read > 0
    assert figures.kinds.keys() == {"demand", "ahead"}
    assert figures.reads == prefill.reads + decode.reads == sum(figures.kinds.values())
    assert figures.decode_bytes == decode.bytes_read
    assert figures.decode_tokens >= tokens  # the second prompt lies between decoded tokens
    assert 0 < figures.redundancy <= 1 and figures.early_again == 0
    half = report(read_io_trace(path), tokens=10)
    assert half.decode_tokens == 10 and 0 < half.decode_bytes < decode.bytes_read


def test_csv_has_a_row_a_token_and_facts(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    llm = load("qwen3moe", cache_mb=0, outputs=Outputs(csv=path))
    evaluate(llm, PROMPTS[0])
    decode = llm.counters.decode
    llm.close()
    rows = csv_rows(path)
    assert len(rows) == decode.tokens == len(PROMPTS[0]) - 1
    for column in ("bytes_read", "reads", "hits", "misses"):
        assert sum(int(row[column]) for row in rows) == getattr(decode, column)
    for row in rows:
        parts = sum(float(row[f"{part}_ms"]) for part in ("compute", "stall", "mgmt"))
        assert float(row["wall_ms"]) == pytest.approx(parts, abs=0.01)
    assert int(rows[-1]["token"]) == decode.tokens
    facts = csv_facts(path)
    assert facts["cache_mb"] == 0 and facts["llama_cpp_python"]


def reference_hits(path: Path, budget: int) -> tuple[int, int]:
    """Decode hits and misses of an LRU cache by the trace's own rule, written independently."""
    size = {int(layer): nbytes for layer, nbytes in csv_facts(path)["layers"].items()}
    hits = misses = 0
    batches: list[tuple[bool, int, list[int]]] = []
    last = None
    for row in csv_rows(path):
        decode, layer = row["phase"] == "1", int(row["layer"])
        key = (row["turn"], decode, row["step"] if decode else None, layer)
        if key != last:
            batches.append((decode, layer, []))
        last = key
        if int(row["expert"]) not in batches[-1][2]:
            batches[-1][2].append(int(row["expert"]))
    # Experts of one size share the part of the budget that is theirs by their bytes.
    held: dict[int, OrderedDict[tuple[int, int], None]] = {s: OrderedDict() for s in size.values()}
    room = {s: budget * s * sum(s == t for t in size.values()) // sum(size.values()) for s in held}
    for decode, layer, experts in batches:
        part = held[size[layer]]
        for expert in experts:
            hit = (layer, expert) in part
            hits, misses = hits + (decode and hit), misses + (decode and not hit)
            part[layer, expert] = None
            part.move_to_end((layer, expert))
        while len(part) * size[layer] > room[size[layer]]:
            part.popitem(last=False)
    return hits, misses


@pytest.mark.parametrize("name", ["qwen3moe", "mixed", "deepseek2", "gemma4"])
@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("policy", [Policy.LRU, Policy.DECAY])
def test_route_trace_replays_to_the_engines_own_hits(
    load: Load, tmp_path: Path, name: str, share: float, policy: Policy
) -> None:
    """The prompt is evaluated in four ubatches."""
    path = tmp_path / "route.csv"
    llm = load(
        name, cache_mb=0, cache_policy=policy.value, n_ubatch=4, outputs=Outputs(route_trace=path)
    )
    assert llm.source
    budget = llm.source.cache.budget = int(llm.layout.expert_bytes * share)
    for batches in PROMPTS:
        evaluate(llm, batches)
    decode, prefill = llm.counters.decode, llm.counters.prefill
    llm.close()
    trace = read_trace(path)
    replayed = replay(trace, budget, policy)
    assert (replayed.hits, replayed.misses) == (decode.hits, decode.misses)
    in_all = sum(replayed.misses_by_batch)
    assert in_all - replayed.misses == prefill.misses
    assert sum(len(batch.experts) for batch in trace.batches) - in_all == (
        decode.hits + prefill.hits
    )
    if policy is Policy.LRU:
        assert reference_hits(path, budget) == (decode.hits, decode.misses)
    rows = csv_rows(path)
    assert sum(int(row["expert_bytes"]) for row in rows if row["phase"] == "1") == (
        replayed.bytes_read
    )
    decoded = [row for row in rows if row["phase"] == "1"]
    assert sum(1 - int(row["residency"]) for row in decoded) == decode.misses
    assert all(row["expert"] == row["router_expert"] for row in rows)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "olmoe"])
def test_route_trace_weights_are_the_graphs(load: Load, tmp_path: Path, name: str) -> None:
    """Softmax routings: normalised weights sum to one, the others do not, all fall by slot."""
    path = tmp_path / "route.csv"
    llm = load(name, cache_mb=0, outputs=Outputs(route_trace=path))
    evaluate(llm, PROMPTS[0])
    k = llm.layout.n_expert_used
    llm.close()
    weights = np.array([float(row["weight"]) for row in csv_rows(path)]).reshape(-1, k)
    assert np.isfinite(weights).all() and (np.diff(weights, axis=1) <= 1e-6).all()
    sums = weights.sum(axis=1)
    if name == "olmoe":  # not normalised
        assert (sums < 0.999).all()
    else:
        np.testing.assert_allclose(sums, 1, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_scores_of_a_trace_rank_the_chosen_experts_first(
    load: Load, tmp_path: Path, name: str, suffix: str
) -> None:
    """As pandas and polars read them; the prompt's rows too."""
    path = tmp_path / f"route.{suffix}"
    llm = load(name, cache_mb=0, outputs=Outputs(route_trace=path, route_scores=True))
    evaluate(llm, PROMPTS[0])
    n_expert, top_k = llm.layout.n_expert, llm.layout.n_expert_used
    llm.close()
    frame = pd.read_csv(path) if suffix == "csv" else pd.read_parquet(path)
    other = pl.read_csv(path) if suffix == "csv" else pl.read_parquet(path)
    first = frame.dropna(subset="scores")
    assert other.drop_nulls("scores")["scores"].to_list() == first["scores"].tolist()
    assert (first["slot"] == 0).all() and len(first) * top_k == len(frame)
    scores = np.stack([np.frombuffer(base64.b64decode(s), "<f2") for s in first["scores"]])
    assert scores.shape[1] == n_expert
    chosen = frame["router_expert"].to_numpy().reshape(-1, top_k)
    worst = np.take_along_axis(scores, chosen, axis=1).min(axis=1)
    others = scores.copy()
    np.put_along_axis(others, chosen, -np.inf, axis=1)
    assert (worst >= others.max(axis=1)).all()  # equal where float16 cannot tell them apart
    assert (worst > others.max(axis=1)).mean() > 0.8
    assert len(read_trace(path).slots) == len(frame)


def test_traces_change_nothing_and_off_costs_no_call(
    load: Load, library: Library, tmp_path: Path
) -> None:
    plain = load("qwen3moe", cache_mb=64)
    outputs = Outputs(tmp_path / "s.csv", tmp_path / "io.csv", tmp_path / "r.csv")
    traced = load("qwen3moe", cache_mb=64, outputs=outputs)
    for llm in (plain, traced):
        for batches, expected in zip(PROMPTS, library.resident("qwen3moe"), strict=True):
            np.testing.assert_array_equal(evaluate(llm, batches), expected)
    # All is cached now: a traced token costs two calls a layer, the second for the weights, and
    # another one none, unless it is one of a prompt or an expert's second use.
    layers, stops = len(plain.layout.moe_layers), []
    for llm in (plain, traced):
        before = llm.stops
        evaluate(llm, PROMPTS[1])
        stops.append(llm.stops - before)
    assert layers <= stops[0] < 2 * layers
    assert stops[1] == 2 * layers * len(PROMPTS[1])


def test_forced_routing_follows_the_trace(load: Load, library: Library, tmp_path: Path) -> None:
    """Replaying a run's own routing gives its logits; another run's routing gives its hits."""
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    llm = load("qwen3moe", cache_mb=0, outputs=Outputs(route_trace=first))
    logits = evaluate(llm, PROMPTS[0])
    llm.close()

    same = load("qwen3moe", cache_mb=0, replay_routing=first)
    np.testing.assert_array_equal(evaluate(same, PROMPTS[0]), logits)

    other = load("qwen3moe", cache_mb=0, replay_routing=first, outputs=Outputs(route_trace=second))
    assert other.source
    budget = other.source.cache.budget = other.layout.token_bytes() * 2
    different = evaluate(other, token_batches(9))
    assert not np.array_equal(different, logits)
    decode = other.counters.decode
    other.close()
    recorded, replayed = csv_rows(first), csv_rows(second)
    assert [r["expert"] for r in recorded] == [r["expert"] for r in replayed]
    assert any(r["expert"] != r["router_expert"] for r in replayed)
    assert {r["committed"] for r in replayed} == {"1"}
    same_hits = replay(read_trace(first), budget, Policy(other.settings.cache_policy))
    assert (same_hits.hits, same_hits.misses) == (decode.hits, decode.misses)
    with pytest.raises(SettingsError, match="the trace ends before position"):
        same.eval([5])


def test_forced_routing_of_another_model_is_refused(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    llm = load("mixtral", cache_mb=0, outputs=Outputs(route_trace=path))
    evaluate(llm, PROMPTS[1])
    llm.close()
    with pytest.raises(SettingsError, match="takes 4 of 16: set n_expert_used"):
        load("qwen3moe", cache_mb=0, replay_routing=path)


def test_throttled_reads_share_the_bandwidth(load: Load) -> None:
    """Counts time, but only against the lower bound that a throttle is."""
    llm = load("qwen3moe", cache_mb=0, throttle=20, io_threads=4)
    evaluate(llm, PROMPTS[1])
    decode = llm.counters.decode
    assert decode.wall_s >= decode.bytes_read / (20 << 20)


def test_fewer_experts_is_another_model(load: Load, library: Library) -> None:
    llm = load("qwen3moe", cache_mb=0, n_expert_used=3)
    logits = evaluate(llm, PROMPTS[1])
    assert not np.array_equal(logits, library.resident("qwen3moe")[1])
    assert llm.counters.decode.misses == 3 * len(llm.layout.moe_layers) * (len(PROMPTS[1]) - 1)


def test_reference_helper_is_deterministic(library: Library) -> None:
    """Bit-equality is only worth something if the resident run repeats itself."""
    model = Resident(library.path("qwen3moe"), threads=2)
    for batches, expected in zip(PROMPTS, library.resident("qwen3moe"), strict=True):
        np.testing.assert_array_equal(model.evaluate(batches), expected)
    model.close()


@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
@pytest.mark.parametrize("compute", ["inline", "worker", "graph"])
def test_a_step_log_has_what_policies_count(load: Load, tmp_path: Path, compute: str) -> None:
    """The lines sum up to the run's totals, and the report's costs are over the same tokens."""
    path = tmp_path / "steps.csv"
    llm = load(
        "qwen3moe", cache_mb=1, force_cache=True, route_ahead=1, route_ahead_compute=compute,
        drop_cold_experts=0.5, outputs=Outputs(csv=path),
    )  # fmt: skip
    assert llm.source
    llm.source.cache.budget = 2 * llm.layout.token_bytes()
    for batches in PROMPTS:
        evaluate(llm, batches)
    report, decode = llm.policies.report(llm.counters.decode), llm.counters.decode
    ahead, dropped = report["route_ahead"], report["drop"]["dropped"]
    prefill, cache = llm.counters.prefill, llm.source.cache
    llm.close()
    lines = csv_rows(path)
    sums = {name: sum(float(line[name]) for line in lines) for name in lines[0] if name != "facts"}
    means = json.loads(lines[-1]["facts"])["means"]
    assert means == {
        name: pytest.approx(total / decode.tokens, abs=1e-6)
        for name, total in sums.items()
        if name != "token"
    }
    assert sums["committed"] == ahead["committed"] == 5 * decode.tokens
    assert (
        sums["compared_slots"] == ahead["slots"] and sums["agreed_slots"] == ahead["agreed_slots"]
    )
    assert sums["passed_through"] == ahead["passed_through"] == 0
    assert sums["dropped"] == dropped > 0
    assert sums["evictions"] + prefill.evictions == cache.evictions > 0
    assert sums["rereads"] + prefill.rereads == cache.rereads > 0
    assert sums["early_bytes"] == decode.early_bytes and 0 < decode.early_bytes < decode.bytes_read
    for name in ("gemv", "issue", "watchdog"):
        each = sums[f"ra_{name}_ms"] / decode.tokens
        assert each == pytest.approx(ahead[f"{name}_ms_per_tok"], abs=1e-3) and each > 0
        assert means[f"ra_{name}_ms"] == pytest.approx(ahead[f"{name}_ms_per_tok"], abs=1e-3)
