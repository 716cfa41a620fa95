"""Drafts bring nothing into a text but what the sampler draws, and rows to verify are decode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import LogitsProcessorList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from support import models
from support.library import CONTEXT, PROMPTS, THREADS, Library, csv_rows
from support.readers import Delayed, Unruly, disk_error
from support.reference import Resident
from support.router_reference import Forced, Routers
from support.speculation import Fortune, Ids, Spy, text

from routeahead import Llama, ReadError
from routeahead.policies.route_ahead import RouteAhead
from routeahead.telemetry.io_trace import read_io_trace, report
from routeahead.telemetry.recorder import Outputs

Load = Callable[..., Llama]

PROMPT = PROMPTS[0][0]
SAMPLED: dict[str, Any] = {"temp": 1.5, "top_k": 0, "min_p": 0.0}  # random text: experts miss


@pytest.fixture(scope="module")
def expected(library: Library) -> Callable[[str], list[int]]:
    """A text of plain decoding that a fixture model may write."""
    known: dict[str, list[int]] = {}

    def of(name: str) -> list[int]:
        if name not in known:
            llm = Llama(library.path(name), n_ctx=CONTEXT, n_threads=THREADS, resident=True)
            llm.set_seed(7)
            known[name] = [*PROMPT, *text(llm, PROMPT, 60, **SAMPLED)]
            llm.close()
        return known[name]

    return of


Expected = Callable[[str], list[int]]


def forcing(text: list[int]) -> LogitsProcessorList:
    """Has this text written, whatever a lossy policy makes of the logits."""

    def force(input_ids: Ids, scores: Any) -> Any:
        return np.where(np.arange(len(scores)) == text[len(input_ids)], 0, -1e9)

    return LogitsProcessorList([force])


def written(llm: Llama, count: int = 60, seed: int = 7) -> list[int]:
    llm.set_seed(seed)
    return text(llm, PROMPT, count, **SAMPLED)


# --- lossless ---


@pytest.mark.parametrize("name", models.FIXTURES)
def test_every_row_is_the_residents(
    load: Load, library: Library, expected: Expected, name: str
) -> None:
    """Logits bit by bit, with slots that crash if a byte is missing and reads that are late."""
    drafts = Fortune(expected(name))
    llm = load(name, cache_mb=0, draft_model=drafts, poison=True, wrap_reader=Delayed)
    spy = Spy().watch(llm)
    tokens = written(llm)
    decode = llm.counters.decode
    assert [token for *_, token in spy.drawn] == tokens
    assert 0 < decode.accepted < decode.drafted and decode.drafts < decode.batches
    assert decode.drafted == sum(len(batch) - 1 for _, batch in spy.batches[1:])
    assert decode.kept == decode.batches + decode.accepted
    assert llm.counters.prefill.tokens == len(PROMPT)
    resident = Resident(library.path(name), n_ctx=CONTEXT, threads=THREADS)
    spy.assert_as(resident)
    resident.close()


SAMPLERS: list[dict[str, Any]] = [
    {"temp": 0.0},
    {"temp": 1.2, "top_k": 0, "repeat_penalty": 1.1, "frequency_penalty": 0.2},
    {"temp": 0.9, "mirostat_mode": 2},
]


@pytest.mark.parametrize("sampling", SAMPLERS, ids=["greedy", "penalties", "mirostat"])
def test_sampling_is_exact(load: Load, sampling: dict[str, Any]) -> None:
    """What is drawn with drafts is what plain decoding would have drawn from the same logits."""
    logits: list[Any] = []

    def keep(_: Ids, scores: Any) -> Any:
        logits.append(np.array(scores))
        return scores

    llm = load("qwen3moe", cache_mb=8)
    llm.set_seed(3)
    plain = text(llm, PROMPT, 40, **sampling)
    llm.reset()
    llm.draft_model = Fortune([*PROMPT, *plain])  # type: ignore[assignment]
    llm.set_seed(3)
    drafted = text(llm, PROMPT, 40, **sampling, logits_processor=LogitsProcessorList([keep]))
    assert llm.counters.decode.accepted > 0
    llm.reset()
    llm.draft_model = None
    llm.set_seed(3)
    given = iter(logits)
    again = LogitsProcessorList([lambda _, scores: next(given)])
    assert text(llm, PROMPT, 40, **sampling, logits_processor=again) == drafted


def test_a_processor_sees_the_text_so_far(load: Load, expected: Expected) -> None:
    """And not the guesses behind the row that is drawn from."""
    llm = load("qwen3moe", cache_mb=8, draft_model=Fortune(expected("qwen3moe")))
    seen: list[list[int]] = []

    def look(input_ids: Ids, scores: Any) -> Any:
        seen.append(input_ids.tolist())
        return scores

    llm.set_seed(7)
    tokens = text(llm, PROMPT, 40, **SAMPLED, logits_processor=LogitsProcessorList([look]))
    assert llm.counters.decode.accepted > 0
    assert seen == [[*PROMPT, *tokens[:count]] for count in range(40)]


# --- what is left behind ---


def test_whenever_it_ends_the_context_has_the_text_alone(load: Load, expected: Expected) -> None:
    """A generator that is closed between rows of a batch leaves nothing of the rest."""
    llm = load("qwen3moe", cache_mb=8, draft_model=Fortune(expected("qwen3moe"), seed=3))
    plain = load("qwen3moe", cache_mb=8)
    cut = 0
    for count in range(1, 24):
        llm.reset()
        tokens = written(llm, count)
        assert llm.n_tokens == len(PROMPT) + count - 1
        assert llm.input_ids[: llm.n_tokens].tolist() == [*PROMPT, *tokens[:-1]]
        cut += llm._requires_eval
        # What follows is as if the context had been filled anew.
        state = [*PROMPT, *tokens]
        for model in (llm, plain):
            model.draft_model = None
        found = text(llm, [*state, 9, 8], 4, temp=0.0)
        plain.reset()
        plain.eval(PROMPT)
        assert found == text(plain, [*state, 9, 8], 4, temp=0.0)
        llm.draft_model = Fortune(expected("qwen3moe"), seed=count)  # type: ignore[assignment]
    assert cut > 3


def test_use_between_two_tokens(load: Load, library: Library, expected: Expected) -> None:
    """Who evaluates something else while a generator rests takes its rows away, not its sense."""
    known = expected("qwen3moe")
    llm = load("qwen3moe", cache_mb=8, draft_model=Fortune(known))
    spy, tokens = Spy().watch(llm), []
    for token in llm.generate(PROMPT, temp=0.0, logits_processor=forcing(known)):
        tokens.append(token)
        if len(tokens) % 3 == 0:
            held = llm.n_tokens
            llm.eval([11, 12])
            llm.n_tokens = held
        if len(tokens) == 40:
            break
    assert tokens == known[len(PROMPT) :][:40]
    assert llm.counters.decode.accepted > 10
    resident = Resident(library.path("qwen3moe"), n_ctx=CONTEXT, threads=THREADS)
    spy.assert_as(resident)
    resident.close()


def test_the_context_may_be_longer_than_a_batch(library: Library) -> None:
    """llama-cpp-python's own loop keeps logits of all rows, in an array of `n_batch`."""
    path = library.path("qwen3moe")
    repeats = LlamaPromptLookupDecoding(num_pred_tokens=50)  # more than a batch, too
    llm = Llama(path, n_ctx=200, n_batch=16, n_threads=1, cache_mb=8, draft_model=repeats)
    spy = Spy().watch(llm)
    tokens = text(llm, [5, 6, 7] * 30, 105, temp=0.0)
    assert len(tokens) == 105 and llm.counters.decode.accepted > 50
    assert max(len(batch) for _, batch in spy.batches) == llm.n_batch == 16
    llm.close()


# --- what is reported ---


def test_reads_are_counted_for_tokens_that_were_kept(
    load: Load, expected: Expected, tmp_path: Path
) -> None:
    """Of the last batch, one: what the others of it were is in no later read."""
    path, drafts = tmp_path / "io.csv", Fortune(expected("qwen3moe"))
    llm = load("qwen3moe", cache_mb=0, draft_model=drafts, outputs=Outputs(io_trace=path))
    spy = Spy().watch(llm)
    written(llm)
    decode, last = llm.counters.decode, len(spy.batches) - 1
    of_last = sum(number == last for number, *_ in spy.drawn)
    llm.close()
    assert report(read_io_trace(path)).decode_tokens == decode.kept - of_last + 1 < decode.tokens


# --- policies see those rows as decode ---


def test_route_ahead_commits_every_row(
    load: Load, library: Library, expected: Expected, tmp_path: Path
) -> None:
    trace = tmp_path / "route.csv"
    drafts = Fortune(expected("qwen3moe"))
    llm = load(
        "qwen3moe",
        cache_mb=8,
        route_ahead=2,
        draft_model=drafts,
        poison=True,
        outputs=Outputs(route_trace=trace),
    )
    spy = Spy().watch(llm)
    text(llm, PROMPT, 50, temp=0.0, logits_processor=forcing(expected("qwen3moe")))
    policy = llm.policies.find(RouteAhead)
    assert policy and llm.counters.decode.drafted > llm.counters.decode.accepted > 0
    layers, counts, decode = len(llm.layout.moe_layers) - 2, policy.counts, llm.counters.decode
    assert counts.committed == layers * decode.batches and counts.passed_through == 0
    assert counts.slots == layers * decode.tokens * models.FIXTURES["qwen3moe"].top_k
    llm.close()

    rows = [row for row in csv_rows(trace) if row["phase"] == "1"]
    slots = models.FIXTURES["qwen3moe"].top_k
    forced = Forced(library.path("qwen3moe"), {}, threads=THREADS)
    routers = Routers(library.path("qwen3moe"), models.FIXTURES["qwen3moe"])
    forced.evaluate([PROMPT])
    logits: list[Any] = [None]
    for at, tokens in spy.batches[1:]:
        routed, count = {}, len(tokens) * slots * len(routers.layers)
        for index in range(0, count, slots):
            of = rows[index : index + slots]
            ids = np.array([int(row["expert"]) for row in of], np.int32)
            routed[int(of[0]["step"]), int(of[0]["layer"])] = ids
            if of[0]["committed"] == "1":
                assert int(of[0]["layer"]) >= routers.layers[2]
        del rows[:count]
        forced._recorded = routed
        logits.append(forced.rows(tokens, at))
        for (position, layer), ids in routed.items():
            if layer < routers.layers[2]:
                continue
            earlier = routers.layers[routers.layers.index(layer) - 2]
            scores = routers.scores(layer, forced.inputs[position, earlier])
            assert routers.is_ranking(ids, scores, 2e-5), (position, layer)
    assert not rows
    for number, row, drawn, _ in spy.drawn:
        if number:
            np.testing.assert_array_equal(drawn, logits[number][row])
    forced.close()


@pytest.mark.parametrize("compute", ["inline", "worker", "graph"])
def test_route_ahead_depends_on_hidden_states_alone(
    load: Load, expected: Expected, compute: str
) -> None:
    logits: list[list[Any]] = []
    for settings in (
        {"cache_mb": 8},
        {"cache_mb": 0, "wrap_reader": Delayed, "poison": True, "route_ahead_compute": compute},
    ):
        llm = load("gemma4", route_ahead=1, draft_model=Fortune(expected("gemma4")), **settings)
        spy = Spy().watch(llm)
        text(llm, PROMPT, 50, temp=0.0, logits_processor=forcing(expected("gemma4")))
        logits.append([drawn for _, _, drawn, _ in spy.drawn])
        policy = llm.policies.find(RouteAhead)
        assert policy and policy.counts.passed_through == 0 and llm.counters.decode.accepted > 0
    np.testing.assert_array_equal(logits[0], logits[1])


LOSSLESS: list[dict[str, Any]] = [
    {"prefetch": 2},
    {"predict_prefetch": True},
    {"predict_log": True},
]
LOSSY: list[dict[str, Any]] = [
    {"drop_cold_experts": 0.9},
    {"expert_substitute": 0.3},
    {"drop_cold_experts": 0.5, "route_ahead": 1},
]


@pytest.mark.parametrize("policy", [*LOSSLESS, *LOSSY], ids="+".join)
@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
def test_other_policies(
    load: Load, library: Library, expected: Expected, policy: dict[str, Any]
) -> None:
    llm = load(
        "qwen3moe",
        cache_mb=1,
        force_cache=True,
        poison=True,
        draft_model=Fortune(expected("qwen3moe")),
        **policy,
    )
    assert llm.source
    llm.source.cache.budget = llm.layout.expert_bytes // 4
    spy = Spy().watch(llm)
    text(llm, PROMPT, 50, temp=0.0, logits_processor=forcing(expected("qwen3moe")))
    assert llm.counters.decode.drafted > llm.counters.decode.accepted > 0
    for lines in llm.policies.report(llm.counters.decode).values():
        assert lines
    if policy in LOSSLESS:
        resident = Resident(library.path("qwen3moe"), n_ctx=CONTEXT, threads=THREADS)
        spy.assert_as(resident)
        resident.close()


# --- faults ---


def test_faults_in_a_batch_to_verify(load: Load, expected: Expected) -> None:
    """The batch leaves no trace, and the same text can be written after it."""
    readers: list[Unruly] = []

    def wrap(inner: Any) -> Unruly:
        readers.append(Unruly(inner))
        return readers[0]

    llm = load("qwen3moe", cache_mb=0, poison=True, wrap_reader=wrap)
    faults = 0
    for after in range(40, 1400, 340):
        llm.draft_model = Fortune(expected("qwen3moe"), seed=after)  # type: ignore[assignment]
        llm.reset()
        reference = written(llm, 30)
        llm.draft_model = Fortune(expected("qwen3moe"), seed=after)  # type: ignore[assignment]
        readers[0].strike(after, disk_error)
        llm.reset()
        try:
            written(llm, 30)
        except ReadError:
            faults += 1
        readers[0].strike(0, disk_error)
        llm.draft_model = Fortune(expected("qwen3moe"), seed=after)  # type: ignore[assignment]
        llm.reset()
        assert written(llm, 30) == reference
    assert faults > 2
