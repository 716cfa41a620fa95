"""Route-ahead commits what it should: against llama.cpp alone, and against its own rules."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import models
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
from support.router_reference import Forced, Ids, Key, Routers

from routeahead import Llama, SettingsError
from routeahead.llamacpp import router_graph
from routeahead.policies.route_ahead import RouteAhead
from routeahead.prediction.worker import Prediction
from routeahead.routing.policy import Routing
from routeahead.telemetry.recorder import Outputs
from routeahead.telemetry.route_trace import read_trace
from routeahead.types import Floats

Load = Callable[..., Llama]

# Float64 scores against ggml's float32: scores closer than this may rank either way.
MARGIN = 2e-5


def route_ahead(llm: Llama) -> RouteAhead:
    policy = llm.policies.find(RouteAhead)
    assert policy
    return policy


def committed_layers(llm: Llama) -> int:
    return len(llm.layout.moe_layers) - route_ahead(llm).depth


def assert_all_counted(llm: Llama) -> None:
    """Every top-k of the run is in exactly one of the counts."""
    counts, totals = route_ahead(llm).counts, llm.counters
    batches = totals.prefill.batches + totals.decode.batches
    assert counts.committed + sum(counts.by_reason.values()) == batches * len(llm.layout.moe_layers)


@pytest.mark.parametrize("name", models.FIXTURES)
def test_beyond_the_last_layer_nothing_changes(load: Load, library: Library, name: str) -> None:
    with pytest.warns(UserWarning, match="commits nothing"):
        llm = load(name, cache_mb=8, route_ahead=models.FIXTURES[name].layers)
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    assert route_ahead(llm).counts.committed == 0
    assert route_ahead(llm).counts.by_reason["structural"] > 0
    assert_all_counted(llm)


@pytest.mark.parametrize("compute", ["inline", "worker"])
@pytest.mark.parametrize("name", models.FIXTURES)
def test_own_input_gives_the_routers_choice(
    load: Load, library: Library, name: str, compute: str
) -> None:
    """Ranked with the *current* layer's input, every selection is the router's own, slot by slot.

    What was read early is then for another selection than the one committed: experts that nobody
    uses, which must do no harm.
    """
    llm = load(name, cache_mb=0, route_ahead=1, route_ahead_compute=compute, poison=True)
    policy, source = route_ahead(llm), llm.source
    assert source
    source.cache.budget = llm.layout.token_bytes()
    settle, ranker = policy.predictions.settle, policy.predictions.ranker
    # A worker would compute its samples by the products that are used below, at the same time.
    policy.predictions.watchdog.every = 1 << 30

    def with_own_input(routing: Routing) -> None:
        settle(routing)
        layer = routing.layer
        if llm.phase == "decode" and layer > llm.layout.moe_layers[0]:
            assert routing.hidden is not None
            ranking = ranker.rank(layer, routing.hidden[0])
            assert policy.offer(policy.serial, layer, ranking[None])

    policy.predictions.settle = with_own_input  # type: ignore[method-assign]
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    counts = policy.counts
    assert counts.committed == committed_layers(llm) * sum(len(b) - 1 for b in PROMPTS)
    assert counts.agreed_slots == counts.slots > 0
    assert counts.passed_through == 0
    assert 0 < source.prefetch.useful < source.prefetch.issued
    assert_all_counted(llm)


def recorded(path: Path) -> tuple[dict[Key, Ids], set[Key]]:
    """Routings of the decoded tokens, and which of them were committed."""
    decoded = [row for row in csv_rows(path) if row["phase"] == "1"]
    ids: dict[Key, list[int]] = {}
    for row in decoded:
        ids.setdefault((int(row["step"]), int(row["layer"])), []).append(int(row["expert"]))
    committed = {(int(r["step"]), int(r["layer"])) for r in decoded if r["committed"] == "1"}
    return {key: np.array(slots, np.int32) for key, slots in ids.items()}, committed


def assert_follows_reference(
    library: Library, name: str, trace: Path, logits: np.ndarray, depth: int
) -> tuple[int, int]:
    """Returns the number of committed routings, and of those decided by a near-tie."""
    path, ids_committed = library.path(name), recorded(trace)
    ids, committed = ids_committed
    forced = Forced(path, ids, threads=THREADS)
    np.testing.assert_array_equal(forced.evaluate(PROMPTS[0]), logits)
    forced.close()
    routers, ties = Routers(path, models.FIXTURES[name]), 0
    for (position, layer), slots in ids.items():
        if (position, layer) not in committed:
            np.testing.assert_array_equal(slots, forced.chosen[position, layer])
            continue
        earlier = routers.layers[routers.layers.index(layer) - depth]
        scores = routers.scores(layer, forced.inputs[position, earlier])
        assert routers.is_ranking(slots, scores, MARGIN), (position, layer)
        ties += slots.tolist() != routers.ranking(scores).tolist()
    return len(committed), ties


@pytest.mark.fast
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("name", models.FIXTURES)
def test_committed_routing_is_the_references(
    load: Load, library: Library, tmp_path: Path, name: str, depth: int
) -> None:
    trace = tmp_path / "route.csv"
    llm = load(name, cache_mb=8, route_ahead=depth, outputs=Outputs(route_trace=trace))
    logits = evaluate(llm, PROMPTS[0])
    expected = committed_layers(llm) * (len(PROMPTS[0]) - 1)
    assert_all_counted(llm)
    assert route_ahead(llm).counts.passed_through == 0
    llm.close()
    committed, ties = assert_follows_reference(library, name, trace, logits, depth)
    assert committed == expected > 0
    assert ties <= 0.01 * committed
    if depth == 1:  # it is another routing, or the check above would say little
        assert not np.array_equal(logits, library.resident(name)[0])


SETTINGS: list[dict[str, object]] = [
    {"io_threads": 1},
    {"io_threads": 2, "poison": True},
    {"io_threads": 4, "overlap": False},
    {"io_threads": 1, "overlap": False, "wrap_reader": Delayed},
    {"io_threads": 2, "wrap_reader": Delayed, "poison": True},
    {"io_threads": 4, "wrap_reader": Delayed},
    {"budget": 0.0},
    {"budget": 0.3, "io_threads": 4, "poison": True},
    {"budget": 1.0},
    {"budget": 0.25, "wrap_reader": Delayed},
]


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("qwen3moe", "inline"),
        ("qwen3moe", "worker"),
        ("gemma4", "worker"),
        ("deepseek2-grouped", "worker"),
        pytest.param("gemma4", "inline", marks=pytest.mark.slow),
        pytest.param("deepseek2-grouped", "inline", marks=pytest.mark.slow),
    ],
)
def test_output_depends_on_the_hidden_states_alone(load: Load, name: str, compute: str) -> None:
    outputs, reads = set(), []
    for settings in SETTINGS:
        chosen = dict(settings)
        share = chosen.pop("budget", 0.2)
        llm = load(name, cache_mb=0, route_ahead=2, route_ahead_compute=compute, **chosen)
        assert llm.source
        llm.source.cache.budget = int(llm.layout.expert_bytes * float(str(share)))
        outputs.add(b"".join(evaluate(llm, batches).tobytes() for batches in PROMPTS))
        assert route_ahead(llm).counts.by_reason["late"] == 0
        reads.append(llm.source.prefetch.issued)
        llm.close()
    assert len(outputs) == 1
    assert reads[6] == 0 and min(reads[:6]) > 0  # without a cache nothing is read early


def late_worker(load: Load, **settings: object) -> tuple[Llama, RouteAhead]:
    llm = load(
        "qwen3moe",
        cache_mb=8,
        route_ahead=2,
        route_ahead_compute="worker",
        route_ahead_late="pass",
        **settings,
    )
    return llm, route_ahead(llm)


def test_late_predictions_pass_and_are_never_stale(
    load: Load, library: Library, tmp_path: Path
) -> None:
    """A worker that sometimes sleeps until the layer has gone on without it."""
    trace = tmp_path / "route.csv"
    llm, policy = late_worker(load, outputs=Outputs(route_trace=trace))
    predictor, rng, seen = policy.predictions._predictor, np.random.default_rng(3), [(0, 0)]
    rank, routed = predictor._rank, policy.routed

    def commit_and_tell(routing: Routing) -> None:
        routed(routing)
        seen[0] = (policy.serial, routing.layer)

    def sometimes_late(prediction: Prediction) -> Ids:
        serial, layer = policy.serial, prediction.layer
        while rng.random() < 0.8 and layer % 2 and seen[0] < (serial, layer):
            time.sleep(0.0005)
        return rank(prediction)

    policy.routed, predictor._rank = commit_and_tell, sometimes_late  # type: ignore
    logits = evaluate(llm, PROMPTS[0])
    counts = policy.counts
    assert_all_counted(llm)
    llm.close()
    committed, ties = assert_follows_reference(library, "qwen3moe", trace, logits, 2)
    assert committed == counts.committed > 0 and counts.by_reason["late"] > 0
    assert ties == 0


def test_a_worker_that_hangs_leaves_the_router_alone(load: Load, library: Library) -> None:
    llm, policy = late_worker(load)
    predictor, go_on = policy.predictions._predictor, threading.Event()
    rank = predictor._rank

    def hang(prediction: Prediction) -> Ids:
        go_on.wait()
        return rank(prediction)

    predictor._rank = hang
    try:
        logits = evaluate(llm, PROMPTS[0])
    finally:
        go_on.set()  # what it has to tell by now is of tokens that are over
    np.testing.assert_array_equal(logits, library.resident("qwen3moe")[0])
    counts = policy.counts
    assert counts.committed == 0
    assert counts.by_reason["late"] == committed_layers(llm) * (len(PROMPTS[0]) - 1)
    assert_all_counted(llm)


# --- passed through, for each reason ---


def test_a_layer_that_routes_fewer_rows_is_the_routers(load: Load) -> None:
    llm = load("qwen3moe", cache_mb=8, route_ahead=1)
    prompt, *tokens = PROMPTS[0]
    llm.eval(prompt)
    llm.phase = "decode"
    llm.eval([tokens[0][0], tokens[1][0]])
    counts = route_ahead(llm).counts
    # The last layer routes one row of the two, whose output alone is wanted.
    assert counts.by_reason["fewer_rows"] == 1
    assert counts.committed == committed_layers(llm) - 1
    llm.eval(tokens[2])
    assert counts.committed == 2 * committed_layers(llm) - 1
    assert_all_counted(llm)


def test_without_a_prompt_the_first_token_passes(load: Load) -> None:
    llm = load("qwen3moe", cache_mb=8, route_ahead=1)
    llm.phase = "decode"
    llm.eval([7])
    llm.eval([8])
    counts = route_ahead(llm).counts
    assert counts.by_reason["first_token"] + counts.by_reason["unreadable"] == committed_layers(llm)
    assert counts.committed == committed_layers(llm)
    assert_all_counted(llm)


def test_a_rule_that_is_not_understood_is_the_routers(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_graph, "_ACTIVATIONS", {})
    llm = load("qwen3moe", cache_mb=8, route_ahead=1)
    with pytest.warns(UserWarning, match="how 6 layers choose their experts is not understood"):
        logits = evaluate(llm, PROMPTS[0])
    np.testing.assert_array_equal(logits, library.resident("qwen3moe")[0])
    counts = route_ahead(llm).counts
    assert counts.by_reason["unranked"] == committed_layers(llm) * (len(PROMPTS[0]) - 1)
    assert_all_counted(llm)


def test_inputs_that_do_not_survive_are_copied_in_time(load: Load) -> None:
    """gemma4's argsort is given the memory of the gate's input; the others' inputs survive."""
    for name, damaged in (("gemma4", True), ("qwen3moe", False)):
        llm = load(name, cache_mb=8, route_ahead=1)
        evaluate(llm, PROMPTS[0])
        policy, layers = route_ahead(llm), set(llm.layout.moe_layers)
        source = policy.predictions.ranker.input  # type: ignore[attr-defined]
        assert source.damaged == (layers if damaged else set())
        assert policy.counts.passed_through == 0


# --- the watchdog ---


def test_a_broken_read_disarms(load: Load, library: Library) -> None:
    """From the verdict on, every routing and every logit is the router's."""
    llm = load("qwen3moe", cache_mb=8, route_ahead=1)
    policy = route_ahead(llm)
    watchdog, source = policy.predictions.watchdog, policy.predictions.ranker.input  # type: ignore
    prompt, *tokens = token_batches(5, decode=60)
    evaluate(llm, [prompt, *tokens[:10]])
    assert watchdog.armed and watchdog.reproduced > 0
    at_topk, rng = source.at_topk, np.random.default_rng(0)

    def scrambled(layer: int, topk: int, rows: int) -> Floats | None:
        hidden = at_topk(layer, topk, rows)
        return None if hidden is None else rng.permutation(hidden, axis=1)

    source.at_topk = scrambled
    with pytest.warns(UserWarning, match="have disarmed themselves: .* of 64 slots") as said:
        evaluate(llm, [prompt, *tokens])
    assert len(said) == 1
    counts, committed = policy.counts, policy.counts.committed
    assert counts.by_reason["disarmed"] > 0 and watchdog.disarmed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batches, expected in zip(PROMPTS, library.resident("qwen3moe"), strict=True):
            np.testing.assert_array_equal(evaluate(llm, batches), expected)
    assert counts.committed == committed
    assert llm.source and llm.source.cache.protected == 0
    assert_all_counted(llm)


@pytest.mark.parametrize("compute", ["inline", "worker"])
@pytest.mark.parametrize("name", models.FIXTURES)
def test_a_sound_run_never_disarms(load: Load, name: str, compute: str) -> None:
    """The watchdog sees every routing here, and every slot is reproduced."""
    llm = load(name, cache_mb=8, route_ahead=2, route_ahead_compute=compute)
    watchdog = route_ahead(llm).predictions.watchdog
    watchdog.every = 1
    evaluate(llm, PROMPTS[0])
    layers, k = len(llm.layout.moe_layers), llm.layout.n_expert_used
    seen = watchdog.slots
    assert seen == watchdog.reproduced
    if compute == "inline":
        assert seen == layers * k * (len(PROMPTS[0]) - 1)
    else:  # a verdict that the worker gives after the last layer comes too late to be heard
        assert seen >= (layers - 2) * k * (len(PROMPTS[0]) - 1)


@pytest.mark.parametrize(("precision", "least"), [("f16", 0.97), ("int8", 0.9)])
def test_a_smaller_router_predicts_nearly_the_same(
    load: Load, tmp_path: Path, precision: str, least: float
) -> None:
    """The first committed layer of the first decoded token is predicted from the same hidden
    vector; so are the others' at nearly the same. The watchdog asks the model's own router, so it
    reproduces every choice."""
    chosen = []
    for number, wanted in enumerate(("f32", precision)):
        path = tmp_path / f"{number}.csv"
        llm = load(
            "qwen3moe", cache_mb=8, route_ahead=1, router_precision=wanted,
            outputs=Outputs(route_trace=path),
        )  # fmt: skip
        policy = route_ahead(llm)
        policy.predictions.watchdog.every = 1
        evaluate(llm, PROMPTS[0][:2])
        facts = policy.report(llm.counters.decode)
        assert facts["watched_slots"] == facts["reproduced_slots"] > 0
        assert facts["convert_s"] > 0
        llm.close()
        ids, committed = recorded(path)
        chosen.append({key: set(ids[key].tolist()) for key in committed})
    same = [len(chosen[0][key] & chosen[1][key]) / len(chosen[0][key]) for key in chosen[0]]
    assert chosen[0].keys() == chosen[1].keys() and np.mean(same) >= least


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"route_ahead": -1}, "route_ahead is -1"),
        ({"route_ahead": 1, "route_ahead_compute": "gpu"}, "route_ahead_compute is 'gpu'"),
        ({"route_ahead": 1, "route_ahead_late": "drop"}, "'pass' or 'wait'"),
        ({"route_ahead": 1, "router_precision": "f8"}, "router_precision is 'f8'"),
        ({"route_ahead": 1, "resident": True}, "resident streams nothing"),
    ],
)
def test_settings_that_make_no_sense(load: Load, settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load("qwen3moe", **settings)


def test_off_costs_no_call(load: Load) -> None:
    """In a cache that holds nearly everything: where all fits, what has settled needs no stop."""
    off, on = (
        with_budget(load, "qwen3moe", 0.99, overlap=False, **settings)
        for settings in ({}, {"route_ahead": 1})
    )
    calls = []
    for llm in (off, on):
        evaluate(llm, PROMPTS[0])
        evaluate(llm, PROMPTS[0])
        before = llm.stops
        evaluate(llm, PROMPTS[0])
        calls.append(llm.stops - before)
    # The same stops: the rows are read at the top-k, which was a stop anyway.
    layers = len(off.layout.moe_layers)
    assert calls == [layers * len(PROMPTS[0])] * 2
    assert off.streamed and off.streamed.callback._input is None


def test_replayed_routing_counts_as_predicted(load: Load, tmp_path: Path) -> None:
    """With a trace, the trace's experts are committed and read early."""
    trace, again = tmp_path / "trace.csv", tmp_path / "again.csv"
    llm = load("qwen3moe", cache_mb=8, outputs=Outputs(route_trace=trace))
    logits = evaluate(llm, PROMPTS[0])
    llm.close()
    other = load(
        "qwen3moe",
        cache_mb=0,
        replay_routing=trace,
        route_ahead=2,
        outputs=Outputs(route_trace=again),
    )
    assert other.source
    other.source.cache.budget = other.layout.token_bytes()
    np.testing.assert_array_equal(evaluate(other, PROMPTS[0]), logits)
    prefetch, counts = other.source.prefetch, route_ahead(other).counts
    assert prefetch.issued == prefetch.useful > 0
    assert counts.committed == 4 * (len(PROMPTS[0]) - 1)
    other.close()
    assert read_trace(again).batches == read_trace(trace).batches
