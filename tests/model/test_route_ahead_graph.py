"""Route-ahead in the graph: what it commits is what inline commits, bit by bit, and whatever
happens, the graph has its own routers back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import models, raw
from support.faults import CutShort, Fault, RaisingStop
from support.library import PROMPTS, Library, csv_rows, evaluate, token_batches
from support.readers import Delayed
from support.reference import Logits

import routeahead.engine.streamed_model as engine
from routeahead import Llama, SettingsError, StreamError
from routeahead.llamacpp import ggml
from routeahead.llamacpp.node_filter import LENT_AT, LENT_FROM, OPERANDS
from routeahead.policies.route_ahead import RouteAhead
from routeahead.telemetry.recorder import Outputs

Load = Callable[..., Llama]
PROMPT, *TOKENS = PROMPTS[0]


def ahead(load: Load, name: str, compute: str, **settings: object) -> Llama:
    chosen = {"cache_mb": 8, "route_ahead": 1, **settings}
    return load(name, route_ahead_compute=compute, **chosen)


def policy_of(llm: Llama) -> RouteAhead:
    policy = llm.policies.find(RouteAhead)
    assert policy
    return policy


def decisions(path: Path) -> list[tuple[str, ...]]:
    columns = ("phase", "step", "layer", "slot", "expert", "committed")
    return [tuple(row[name] for name in columns) for row in csv_rows(path)]


def products(llm: Llama) -> list[int]:
    """The list to which the layers go whose routers are computed in the callback from now on."""
    ranker, layers = policy_of(llm).predictions.ranker, list[int]()

    def note(inner: Callable[..., object]) -> Callable[..., object]:
        def noting(layer: int, *arguments: object) -> object:
            layers.append(layer)
            return inner(layer, *arguments)

        return noting

    for name in ("predict", "best", "own", "rank"):
        setattr(ranker, name, note(getattr(ranker, name)))
    return layers


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.fast)])
@pytest.mark.parametrize("name", models.FIXTURES)
def test_as_inline_bit_by_bit(
    load: Load, library: Library, tmp_path: Path, name: str, depth: int
) -> None:
    for weights in ("true", "predicted"):
        logits, routed, computed = [], [], []
        for compute in ("inline", "graph"):
            trace = tmp_path / f"{weights}-{compute}.csv"
            llm = ahead(
                load, name, compute, route_ahead=depth, route_ahead_weights=weights, poison=True,
                outputs=Outputs(route_trace=trace),
            )  # fmt: skip
            computed.append(products(llm))
            logits.append([evaluate(llm, batches) for batches in PROMPTS])
            counts, watchdog = policy_of(llm).counts, policy_of(llm).predictions.watchdog
            assert counts.passed_through == 0
            assert watchdog.slots == watchdog.reproduced > 0
            layers, tokens = llm.layout.moe_layers, llm.counters.decode.tokens
            assert counts.committed == (len(layers) - depth) * tokens
            llm.close()
            routed.append(decisions(trace))
        for inline, graph, resident in zip(*logits, library.resident(name), strict=True):
            np.testing.assert_array_equal(graph, inline)
            np.testing.assert_array_equal(graph[0], resident[0])  # the prompt
            assert not np.array_equal(graph, resident)
        assert routed[0] == routed[1]
        lent, samples = len(layers) - 2 * depth, tokens * len(layers) // watchdog.every
        if weights == "predicted":  # the first layers' predictions, and the samples' two products
            assert len(computed[1]) <= depth * tokens + 2 * samples
            assert len(computed[1]) <= len(computed[0]) - lent * tokens + 2 * samples
        else:
            assert set(computed[1]) == set(layers)


def test_weights_are_what_sets_the_two_rules_apart(load: Load, library: Library) -> None:
    """In a model whose weights are those of the chosen experts, the first token's first committed
    layer has the same experts under both rules, and other weights."""
    rows = {}
    for weights in ("true", "predicted"):
        llm = ahead(load, "qwen3moe", "inline", route_ahead_weights=weights)
        rows[weights] = evaluate(llm, PROMPTS[0])
    assert np.array_equal(rows["true"][0], rows["predicted"][0])
    assert not np.array_equal(rows["true"][1], rows["predicted"][1])


def test_predicted_weights_are_the_predictions(load: Load, tmp_path: Path) -> None:
    """qwen3moe's weights are its probabilities, scaled to a sum of 1: those that were predicted."""
    trace = tmp_path / "route.csv"
    llm = ahead(
        load, "qwen3moe", "graph", route_ahead_weights="predicted",
        outputs=Outputs(route_trace=trace),
    )  # fmt: skip
    predictions, expected = policy_of(llm).predictions, {}
    weigh = predictions.weigh

    def noting(routing, ranking) -> None:  # type: ignore[no-untyped-def]
        weigh(routing, ranking)
        chosen = ranking.probabilities[0][ranking.ids[0]].astype(np.float64)
        expected[int(routing.positions[0]), routing.layer] = chosen / chosen.sum()

    predictions.weigh = noting  # type: ignore[method-assign]
    evaluate(llm, PROMPTS[0])
    llm.close()
    found: dict[tuple[int, int], list[float]] = {}
    for row in csv_rows(trace):
        if row["committed"] == "1":
            key = int(row["step"]), int(row["layer"])
            found.setdefault(key, []).append(float(row["weight"]))
    assert found.keys() == expected.keys() and found
    for key, weights in found.items():
        np.testing.assert_allclose(weights, expected[key], atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2-grouped", "gemma4"])
def test_nothing_of_the_model_is_written_to(load: Load, name: str) -> None:
    """The routers' tensors are as they were at every stop: other contexts of the model use them.
    The nodes that were pointed elsewhere have their own operands back at the top-k."""
    llm = ahead(load, name, "graph", route_ahead_weights="predicted")
    assert llm.streamed
    evaluate(llm, PROMPTS[0][:3])
    state, stream = llm.streamed.callback._state, llm.streamed.stream
    routers = policy_of(llm).predictions.ranker.input.routers  # type: ignore[attr-defined]
    addresses = {
        address
        for router in routers.values()
        for address in (router.matrix, router.router_bias, router.selection_bias)
        if address
    }
    assert len(addresses) >= len(routers)

    def structs() -> dict[int, bytes]:
        return {address: bytes(ggml.tensor_at(address)) for address in addresses}

    before, routed, lent = structs(), stream.routed, []

    def look(layer, ids, hidden):  # type: ignore[no-untyped-def]
        assert structs() == before
        assert not state[LENT_AT : LENT_AT + 3].any()
        lent.append(llm.streamed.callback.ranked_for)
        return routed(layer, ids, hidden)

    stream.routed = look  # type: ignore[method-assign]
    evaluate(llm, PROMPTS[0])
    assert any(lent)
    assert structs() == before


def test_a_graph_that_is_used_again_has_its_routers_back(load: Load) -> None:
    """After some tokens in the graph, route-ahead is disarmed: llama.cpp goes on with its graph."""
    prompt, *tokens = token_batches(5, decode=24)
    rows = []
    for compute in ("inline", "graph"):
        llm = ahead(load, "gpt-oss", compute, route_ahead_weights="predicted")
        llm.eval(prompt)
        llm.phase = "decode"
        for number, token in enumerate(tokens):
            if number == 12:
                policy_of(llm).predictions.watchdog.disarmed = "by this test"
            llm.eval(token)
            pointer = llm._ctx.get_logits_ith(-1)
            rows.append(np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy())
        assert policy_of(llm).counts.by_reason["disarmed"] > 0
    np.testing.assert_array_equal(rows[:24], rows[24:])


def assert_as_before(llm: Llama, expected: list[Logits]) -> None:
    for batches, logits in zip(PROMPTS, expected, strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), logits)


@pytest.fixture(scope="module")
def sound(library: Library) -> list[Logits]:
    """Logits of PROMPTS, inline and undisturbed."""
    from support.library import CONTEXT, THREADS

    llm = Llama(
        library.path("deepseek2"), n_ctx=CONTEXT, n_batch=CONTEXT, n_threads=THREADS, cache_mb=8,
        route_ahead=1, route_ahead_weights="predicted",
    )  # fmt: skip
    logits = [evaluate(llm, batches) for batches in PROMPTS]
    llm.close()
    return logits


def deepseek(load: Load, **settings: object) -> Llama:
    return ahead(load, "deepseek2", "graph", route_ahead_weights="predicted", **settings)


@pytest.mark.fast
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stop", ["routed", "product"])
def test_a_fault_at_each_stop(
    load: Load,
    sound: list[Logits],
    monkeypatch: pytest.MonkeyPatch,
    stop: str,
    call: int,
    error: type[BaseException],
) -> None:
    llm = deepseek(load, poison=True, cache_mb=0)
    assert llm.streamed
    llm.eval(PROMPT)
    llm.phase = "decode"
    llm.eval(TOKENS[0])
    stream = llm.streamed.stream
    monkeypatch.setattr(stream, stop, RaisingStop(getattr(stream, stop), error, call))
    with pytest.raises(error):
        llm.eval(TOKENS[1])
    assert not llm.streamed.callback._state[LENT_FROM : LENT_AT + OPERANDS].any()
    monkeypatch.undo()
    llm.eval(TOKENS[1])
    row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
    np.testing.assert_array_equal(row, sound[0][2])
    assert_as_before(llm, sound)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("run", [evaluate, raw.evaluate], ids=["eval", "llama_decode"])
def test_a_callback_that_is_cut_short(
    load: Load, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Logits]
) -> None:
    """What `llama_decode` is given directly is announced at the first top-k, so that less is
    predicted: hence the same of inline is what to compare with."""
    inline = ahead(load, "deepseek2", "inline", route_ahead_weights="predicted")
    expected = [run(inline, batches) for batches in PROMPTS]
    monkeypatch.setattr(engine, "EvalCallback", CutShort)
    llm = deepseek(load)
    assert llm.streamed
    stream, routed, calls = llm.streamed.stream, llm.streamed.stream.routed, list[int]()

    def arm(layer, ids, hidden):  # type: ignore[no-untyped-def]
        calls.append(layer)
        llm.streamed.callback.armed = len(calls) > 30
        return routed(layer, ids, hidden)

    stream.routed = arm  # type: ignore[method-assign]
    with pytest.raises((KeyboardInterrupt, AssertionError)):
        run(llm, PROMPTS[0])
    assert policy_of(llm).counts.committed > 0
    llm.streamed.callback.armed = False
    stream.routed = routed  # type: ignore[method-assign]
    for batches, logits in zip(PROMPTS, expected, strict=True):
        np.testing.assert_array_equal(run(llm, batches), logits)


@pytest.mark.parametrize(
    "settings",
    [
        {"wrap_reader": Delayed, "poison": True, "io_threads": 4},
        {"wrap_reader": Delayed, "overlap": False, "io_threads": 1},
        {"cache_mb": 0, "poison": True},
    ],
)
def test_the_output_depends_on_the_hidden_states_alone(
    load: Load, sound: list[Logits], settings: dict[str, object]
) -> None:
    llm = deepseek(load, **settings)
    assert llm.source
    if llm.source.cache.budget:
        llm.source.cache.budget = int(0.2 * llm.layout.expert_bytes)
    assert_as_before(llm, sound)


def test_several_rows_are_computed_as_inline_does(load: Load) -> None:
    rows = []
    for compute in ("inline", "graph"):
        llm = ahead(load, "qwen3moe", compute, route_ahead_weights="predicted")
        llm.eval(PROMPT)
        llm.phase = "decode"
        for tokens in (TOKENS[0], [*TOKENS[1], *TOKENS[2], *TOKENS[3]], TOKENS[4]):
            llm.eval(tokens)
            pointer = llm._ctx.get_logits_ith(-1)
            rows.append(np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy())
    np.testing.assert_array_equal(rows[:3], rows[3:])


def test_where_nothing_is_committed_nothing_is_lent(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From skipped layers nothing is predicted, and a layer that is spared needs its router."""
    rows = []
    for compute in ("inline", "graph"):
        llm = ahead(
            load,
            "qwen3moe",
            compute,
            route_ahead_skip=2,
            route_ahead_weights="predicted",
            poison=True,
        )
        rows.append(evaluate(llm, PROMPTS[0]))
        counts = policy_of(llm).counts
        assert counts.committed == 3 * len(TOKENS) and counts.passed_through == 0
    np.testing.assert_array_equal(*rows)
    monkeypatch.setattr("routeahead.policies.route_ahead.COUNTED_SLOTS", 8)
    llm = ahead(
        load, "qwen3moe", "graph", route_ahead_min_agreement=0.9, poison=True, wrap_reader=Delayed,
        cache_mb=1, force_cache=True,
    )  # fmt: skip
    assert llm.source
    llm.source.cache.budget = 2 * llm.layout.token_bytes()
    evaluate(llm, token_batches(6, decode=60))
    counts, made = policy_of(llm).counts, llm.source.prefetch
    assert counts.by_reason["spared"] > 0 < counts.committed and counts.passed_through == 0
    assert made.useful < made.issued  # some were guesses


def test_routers_that_are_not_alike_are_not_lent(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed in the callback, and the output is the same."""
    llm = ahead(load, "qwen3moe", "graph", route_ahead_weights="predicted")
    expected = evaluate(llm, PROMPTS[0])
    monkeypatch.setattr("routeahead.prediction.ranker.make_loan", lambda *_: None)
    other = ahead(load, "qwen3moe", "graph", route_ahead_weights="predicted")
    layers = products(other)
    np.testing.assert_array_equal(evaluate(other, PROMPTS[0]), expected)
    assert len(layers) >= (len(other.layout.moe_layers) - 1) * len(TOKENS)


def test_a_router_that_is_lent_in_part_is_an_error(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The top-k would be of neither layer."""
    llm = ahead(load, "gpt-oss", "graph")
    evaluate(llm, PROMPTS[0][:3])
    lending = policy_of(llm).predictions.ranker.input.lending  # type: ignore[attr-defined]
    lend = lending.lend

    def without_bias(loan) -> None:  # type: ignore[no-untyped-def]
        lend(loan)
        lending._state[LENT_FROM + 1] = 0

    lending.lend = without_bias
    with pytest.raises(StreamError, match="1 of 2 parts of a router"):
        evaluate(llm, PROMPTS[0])


def test_a_router_that_was_not_lent_after_all_is_its_own(load: Load) -> None:
    llm = ahead(load, "qwen3moe", "graph", route_ahead_weights="predicted")
    evaluate(llm, PROMPTS[0][:3])
    lending = policy_of(llm).predictions.ranker.input.lending  # type: ignore[attr-defined]
    lend = lending.lend

    def in_vain(loan) -> None:  # type: ignore[no-untyped-def]
        lend(loan)
        lending._state[LENT_FROM] = 0

    lending.lend = in_vain
    evaluate(llm, PROMPTS[0])
    lost = policy_of(llm).counts.by_reason["unreadable"]
    layers = len(llm.layout.moe_layers)
    assert 0 < lost <= layers  # each layer tried once
    evaluate(llm, PROMPTS[0])
    assert policy_of(llm).counts.by_reason["unreadable"] == lost


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"predict_prefetch": True}, "'graph' gives a router's product to a later layer"),
        ({"route_ahead": 1, "router_precision": "int8"}, "'graph' multiplies by the model's own"),
        ({"route_ahead": 0}, "has no effect without"),
    ],
)
def test_settings_that_make_no_sense(load: Load, settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load("qwen3moe", route_ahead_compute="graph", **settings)
