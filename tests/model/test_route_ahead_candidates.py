"""Candidates: each layer's router chooses among what was read early and what the cache has."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import models
from support.library import PROMPTS, Library, evaluate, token_batches, with_budget
from support.readers import Delayed, Failing, disk_error

from routeahead import Llama, ReadError, SettingsError
from routeahead.engine.fingerprint import fingerprint
from routeahead.experts.cache import ExpertCache
from routeahead.experts.eviction import eviction
from routeahead.experts.reader import Reader
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.policies.route_ahead import RouteAhead
from routeahead.prediction.gates import Gate, Gates, write_gates
from routeahead.prediction.worker import Prediction
from routeahead.routing.policy import Routing
from routeahead.telemetry.io_trace import read_io_trace
from routeahead.telemetry.recorder import Outputs
from routeahead.types import Ids

Load = Callable[..., Llama]
MODES = [("inline", 1), ("inline", 2), ("worker", 1), ("worker", 2), ("worker", 3)]


def choosing(load: Load, name: str, more: int, *, share: float = 0.25, **settings: object) -> Llama:
    chosen = {"route_ahead": 2, **settings}
    return with_budget(load, name, share, route_ahead_candidates=more, **chosen)


def policy_of(llm: Llama) -> RouteAhead:
    policy = llm.policies.find(RouteAhead)
    assert policy
    return policy


def committed(llm: Llama, tokens: int) -> int:
    return (len(llm.layout.moe_layers) - policy_of(llm).depth) * tokens


# --- with all experts as candidates, the router's choice stands ---


@pytest.mark.fast
@pytest.mark.parametrize("compute", ["inline", "worker"])
@pytest.mark.parametrize("name", models.FIXTURES)
def test_all_experts_as_candidates_change_nothing(
    load: Load, library: Library, name: str, compute: str
) -> None:
    more = models.FIXTURES[name].experts
    llm = choosing(load, name, more, poison=True, route_ahead_compute=compute)
    for batches, expected in zip(PROMPTS, library.resident(name), strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), expected)
    counts, tokens = policy_of(llm).counts, sum(len(batches) - 1 for batches in PROMPTS)
    assert counts.committed == committed(llm, tokens) and counts.passed_through == 0
    assert counts.agreed_slots == counts.slots > 0
    assert llm.source and 0 < llm.source.prefetch.useful < llm.source.prefetch.issued


def test_so_with_several_rows_and_with_matrices_that_agree_with_no_router(
    load: Load, library: Library, tmp_path: Path
) -> None:
    """What is predicted does not matter then; each row chooses for itself."""
    layout, rng = read_layout(library.path("qwen3moe")), np.random.default_rng(5)
    shape = layout.n_expert, int(layout.value("embedding_length"))
    made = [
        Gate(layer, 2, rng.normal(size=shape).astype(np.float32), 0.5, 0.5, 1.0)
        for layer in layout.moe_layers[2:]
    ]
    gates = tmp_path / "gates.safetensors"
    write_gates(gates, Gates.of(fingerprint(layout.loaded()), made, fitted=1, held=1))
    prompt, *tokens = token_batches(4, decode=10)
    batches = [prompt, tokens[0], tokens[1] + tokens[2] + tokens[3], tokens[4]]
    logits = [
        evaluate(llm, batches)
        for llm in (
            load("qwen3moe", cache_mb=8),
            choosing(load, "qwen3moe", layout.n_expert, route_ahead_gates=gates, poison=True),
            choosing(load, "qwen3moe", 1, route_ahead_gates=gates),
        )
    ]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], logits[2])


# --- the choice is the books' ---


def recorded(llm: Llama) -> list[tuple[Any, ...]]:
    """From now on: what the cache was asked, and each routing before and after, in order."""
    events: list[tuple[Any, ...]] = []
    source, policy = llm.source, policy_of(llm)
    assert source
    require, early, release, routed = (
        source.require, source.read_early, source.release, policy.routed,
    )  # fmt: skip

    def required(layer: int, experts: Any, rows: Ids | None = None) -> Any:
        events.append(("required", layer, list(experts), rows if rows is None else rows.copy()))
        return require(layer, experts, rows)

    def read_early(layer: int, experts: Any) -> None:
        events.append(("early", layer, list(experts)))
        early(layer, experts)

    def released() -> None:
        events.append(("released",))
        release()

    def chosen(routing: Routing) -> None:
        router, scores = routing.ids.copy(), routing.scores()
        scores = None if scores is None else scores.copy()
        routed(routing)
        if routing.committed:
            events.append(("chosen", routing.layer, router[0], scores, routing.ids[0].copy()))

    source.require, source.read_early, source.release = required, read_early, released  # type: ignore
    policy.routed = chosen  # type: ignore[method-assign]
    return events


class Replayed:
    """The same events, told to a cache that reads nothing.

    Attributes:
        admitted: experts that were absent when they were to be read early.
        late: those that were absent when a committed layer asked.
        filled: slots that were left to the router, because too few experts were there.
        kinds: of the slots that were chosen: the router's own, predicted ones, others in the cache.
    """

    def __init__(self, llm: Llama, events: list[tuple[Any, ...]]) -> None:
        assert llm.source
        self._n_expert = llm.layout.n_expert
        make = eviction(llm.settings.cache_policy, self._n_expert)
        self._cache = ExpertCache(llm.source.cache.budget, llm.layout.bytes_by_layer(), make)
        self._early: dict[int, list[int]] = {}
        self._committed: set[int] = set()
        self.admitted = self.late = self.filled = 0
        self.kinds = {"router": 0, "predicted": 0, "cached": 0}
        for kind, *what in events:
            getattr(self, kind)(*what)

    def required(self, layer: int, experts: list[int], rows: Ids | None) -> None:
        misses = self._cache.lookup(layer, experts, rows).misses
        self.late += len(misses) if layer in self._committed else 0

    def early(self, layer: int, experts: list[int]) -> None:
        self.admitted += len(self._cache.admit_early(layer, experts))
        self._early[layer] = experts

    def released(self) -> None:
        self._cache.release()
        self._early.clear()
        self._committed.clear()

    def chosen(self, layer: int, router: Ids, scores: Any, chosen: Ids) -> None:
        candidates = self._early[layer]
        here = [e for e in range(self._n_expert) if (layer, e) in self._cache]
        assert set(candidates) <= set(here)

        def key(expert: int) -> tuple[float, int]:
            place = candidates.index(expert) if expert in candidates else self._n_expert
            return -float(scores[0, expert]), place

        best = sorted(here, key=key)[: len(chosen)]
        absent = [expert for expert in router.tolist() if expert not in best]
        absent = absent[: len(chosen) - len(best)]
        assert set(chosen.tolist()) == {*best, *absent}
        self.filled += len(absent)
        if set(chosen.tolist()) == set(router.tolist()):
            assert chosen.tolist() == router.tolist()
        self._committed.add(layer)
        for expert in chosen.tolist():
            is_router = expert in router.tolist()
            kind = "router" if is_router else "predicted" if expert in candidates else "cached"
            self.kinds[kind] += 1


@pytest.mark.fast
@pytest.mark.parametrize(("compute", "depth"), MODES)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        *[(name, 2) for name in ("qwen3moe", "gpt-oss", "deepseek2-grouped", "gemma4", "olmoe")],
        *[("qwen3moe", more) for more in (0, -1, -3)],
        ("deepseek2-grouped", 0),
    ],
)
def test_the_choice_follows_from_the_caches_books(
    load: Load, tmp_path: Path, name: str, more: int, compute: str, depth: int
) -> None:
    """A second cache that is told the same lookups and early reads gives every choice, and every
    read. None is late, unless fewer are read early than are used, and each is counted."""
    reads = tmp_path / "reads.csv"
    llm = choosing(
        load, name, more, route_ahead=depth, route_ahead_compute=compute, wrap_reader=Delayed,
        poison=True, outputs=Outputs(io_trace=reads),
    )  # fmt: skip
    events = recorded(llm)
    for batches in PROMPTS:
        evaluate(llm, batches)
    source, counts, decode = llm.source, policy_of(llm).counts, llm.counters.decode
    assert source
    replayed = Replayed(llm, events)
    tokens = sum(len(batches) - 1 for batches in PROMPTS)
    assert counts.committed == committed(llm, tokens) and counts.passed_through == 0
    assert sum(replayed.kinds.values()) == counts.slots
    assert replayed.kinds["router"] == counts.agreed_slots
    assert min(replayed.kinds.values()) > 0
    assert replayed.late == replayed.filled and replayed.admitted == source.prefetch.issued > 0
    assert more < 0 or not replayed.filled
    projections = len(llm.layout.experts) // len(llm.layout.moe_layers)
    first = llm.layout.moe_layers[:depth]
    llm.close()
    trace = read_io_trace(reads)
    decoded = trace["phase"] == "decode"
    early = trace["kind"] == "committed"
    assert early.sum() == replayed.admitted * projections
    assert more < 0 or set(trace["layer"][decoded & ~early]) <= set(first)
    assert trace["bytes"][decoded].sum() == decode.bytes_read
    assert decoded.sum() == decode.reads == decode.misses * projections


# --- the output does not depend on time ---

SETTINGS: list[dict[str, object]] = [
    {"io_threads": 1},
    {"io_threads": 2, "poison": True},
    {"io_threads": 4, "overlap": False},
    {"io_threads": 1, "overlap": False, "wrap_reader": Delayed},
    {"io_threads": 4, "wrap_reader": Delayed, "poison": True},
]


def hesitant(llm: Llama) -> None:
    """Makes a worker as slow as a layer, now and then."""
    predictor, rng = policy_of(llm).predictions._predictor, np.random.default_rng()
    rank = predictor._rank

    def slow(prediction: Prediction) -> Ids:
        time.sleep(rng.choice([0, 0, 0.0005, 0.002]))
        return rank(prediction)

    predictor._rank = slow


@pytest.mark.parametrize(("compute", "depth"), MODES)
def test_the_output_is_the_same_however_fast_disk_and_worker_are(
    load: Load, compute: str, depth: int
) -> None:
    outputs, reads = set(), set()
    for settings in SETTINGS:
        llm = choosing(
            load, "qwen3moe", 2, route_ahead=depth, route_ahead_compute=compute, **settings
        )
        if compute == "worker":
            hesitant(llm)
        outputs.add(b"".join(evaluate(llm, batches).tobytes() for batches in PROMPTS))
        assert llm.source
        reads.add((llm.source.prefetch.issued, llm.counters.decode.misses))
        llm.close()
    assert len(outputs) == len(reads) == 1


def test_a_layer_that_is_spared_does_not_make_the_others_depend_on_time(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its candidates are guesses, some of which land."""
    monkeypatch.setattr("routeahead.policies.route_ahead.COUNTED_SLOTS", 8)
    outputs = set()
    for settings in SETTINGS:
        llm = choosing(load, "qwen3moe", 2, route_ahead_min_agreement=0.9, **settings)
        outputs.add(evaluate(llm, token_batches(6, decode=40)).tobytes())
        counts = policy_of(llm).counts
        assert counts.by_reason["spared"] > 0 < counts.committed and counts.passed_through == 0
        llm.close()
    assert len(outputs) == 1


def test_more_candidates_agree_more_and_skipped_layers_are_the_routers(load: Load) -> None:
    agreed = []
    for more in (0, 1, 2, 4, 8):
        llm = choosing(load, "qwen3moe", more, share=0.1, route_ahead_skip=1)
        evaluate(llm, PROMPTS[0])
        counts, tokens = policy_of(llm).counts, len(PROMPTS[0]) - 1
        assert counts.committed == 3 * tokens
        assert counts.by_reason["structural"] == 3 * tokens
        agreed.append(counts.agreed_slots / counts.slots)
        report = policy_of(llm).report(llm.counters.decode)
        assert report["candidates"] == more
    assert agreed == sorted(set(agreed))


def test_fewer_are_read_and_what_the_cache_lacks_is_the_routers(load: Load) -> None:
    """One expert is read early and there is hardly a cache: the others are read on demand."""
    llm = choosing(load, "qwen3moe", -3, share=0.02, poison=True)
    for batches in PROMPTS:
        evaluate(llm, batches)
    counts, source = policy_of(llm).counts, llm.source
    assert source and counts.committed == committed(llm, sum(len(b) - 1 for b in PROMPTS))
    assert source.prefetch.issued <= counts.committed
    assert counts.agreed_slots >= 3 * counts.committed  # of 4 a routing


# --- faults ---


@pytest.mark.parametrize("number", [1, 3, 9, 20, 33])
def test_a_read_that_fails_ends_the_batch_and_leaves_nothing(load: Load, number: int) -> None:
    """Also that of a candidate which was not chosen: a disk that fails is not passed over."""
    made: list[Failing] = []

    def wrap(inner: Reader) -> Reader:
        made.append(Failing(inner, lambda read: read == number, disk_error))
        return made[0]

    sound = choosing(load, "qwen3moe", 4)
    expected = [evaluate(sound, batches) for batches in PROMPTS]
    llm = choosing(load, "qwen3moe", 4, wrap_reader=wrap, poison=True)
    prompt, *tokens = PROMPTS[0]
    llm.eval(prompt)
    made[0].armed, llm.phase = True, "decode"
    with pytest.raises(ReadError, match="Input/output error"):
        for index in count():
            llm.eval(tokens[index % len(tokens)])
    made[0].armed = False
    for batches, logits in zip(PROMPTS, expected, strict=True):
        np.testing.assert_array_equal(evaluate(llm, batches), logits)


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"route_ahead": 0}, "route_ahead_candidates has no effect without route_ahead"),
        ({"route_ahead_candidates": -4}, "uses 4 experts: give at least -3"),
        ({"route_ahead_compute": "graph"}, "ranks for another layer: use 'inline' or 'worker'"),
        ({"route_ahead_weights": "predicted"}, "leave route_ahead_weights='predicted' out"),
        ({"drop_cold_experts": 0.5}, "drop_cold_experts exclude each other"),
        ({"replay_routing": Path("t.csv")}, "replay_routing exclude each other"),
        ({"fill_cache": True}, "the output would depend on how fast the disk is"),
        ({"cache_mb": 0}, "asks what is in the cache, and cache_mb=0 keeps nothing"),
    ],
)
def test_settings_that_make_no_sense(load: Load, settings: dict[str, object], message: str) -> None:
    given = {"cache_mb": 8, "route_ahead": 2, "route_ahead_candidates": 2, **settings}
    with pytest.raises(SettingsError, match=message):
        load("qwen3moe", **given)
