"""Clients that call `llama_decode(llm.ctx, ...)` themselves: what they are told of a fault."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from support import raw
from support.faults import STOPS, CutShort, Fault, RaisingStop, interrupt_next_read
from support.library import PROMPTS, Library, evaluate, with_budget
from support.readers import Failing, disk_error

import routeahead.engine.streamed_model as engine
from routeahead import Llama, Policy, ReadError
from routeahead.experts.reader import Reader

Load = Callable[..., Llama]
NAME = "qwen3moe"
ABORTED = 2  # what llama.h says of a batch that was aborted
PROMPT, *TOKENS = PROMPTS[0]

pytestmark = pytest.mark.fast


def failing(
    number: int, *, later: bool = False
) -> tuple[Callable[[Reader], Reader], list[Failing]]:
    """Fails at the read of that number; with `later`, at those after it as well."""
    made: list[Failing] = []

    def strikes(count: int) -> bool:
        return count == number or (later and count > number)

    def wrap(inner: Reader) -> Reader:
        made.append(Failing(inner, strikes, disk_error))
        return made[0]

    return wrap, made


def assert_right(llm: Llama, library: Library) -> None:
    """The next batches are right, whether they are sent directly or through the class."""
    for batches, expected in zip(PROMPTS, library.resident(NAME), strict=True):
        np.testing.assert_array_equal(raw.evaluate(llm, batches), expected)
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


@pytest.mark.parametrize("cache_mb", [0, 64])
def test_right_without_a_fault(load: Load, library: Library, cache_mb: int) -> None:
    assert_right(load(NAME, cache_mb=cache_mb, poison=cache_mb == 0), library)


EARLY: list[dict[str, Any]] = [{"predict_prefetch": True}, {"prefetch": 2}]


@pytest.mark.parametrize("settings", EARLY, ids=["predicted", "temporal"])
def test_early_reads(load: Load, library: Library, settings: dict[str, Any]) -> None:
    """What is read early in one batch is used or forgotten in the next, also after a fault."""
    wrap, made = failing(40, later=True)  # a guess that nobody uses may fail unnoticed
    llm = with_budget(load, NAME, 0.3, wrap_reader=wrap, poison=True, **settings)
    assert_right(llm, library)
    assert raw.decode(llm, PROMPT, 0) == -1  # the context holds another prompt: nothing ran
    raw.clear(llm)
    assert raw.decode(llm, PROMPT, 0) == 0
    made[0].armed = True
    codes = []
    for index, token in enumerate(TOKENS):
        codes.append(raw.decode(llm, token, len(PROMPT) + index))
        if codes[-1]:
            break
    assert codes[-1] == ABORTED
    made[0].armed = False
    assert_right(llm, library)


@pytest.mark.parametrize("number", [1, 2, 30])
def test_read_error_is_returned_and_kept(load: Load, library: Library, number: int) -> None:
    wrap, made = failing(number)
    llm = load(NAME, cache_mb=0, wrap_reader=wrap, poison=True)
    assert raw.decode(llm, PROMPT, 0) == 0
    made[0].armed = True
    assert raw.decode(llm, TOKENS[0], len(PROMPT)) == ABORTED
    made[0].armed = False
    assert raw.next_position(llm) == len(PROMPT)  # llama.cpp removed the batch
    with pytest.raises(ReadError, match=r"layer \d+ expert \d+"):
        llm.check()
    llm.check()  # once
    assert raw.decode(llm, TOKENS[0], len(PROMPT)) == 0
    assert_right(llm, library)


def test_next_call_through_the_class_raises(load: Load, library: Library) -> None:
    wrap, made = failing(2)
    llm = load(NAME, cache_mb=64, wrap_reader=wrap)
    made[0].armed = True
    assert raw.decode(llm, PROMPT, 0) == ABORTED
    made[0].armed = False
    with pytest.raises(ReadError):
        llm.eval(PROMPT)
    assert llm.n_tokens == 0
    assert_right(llm, library)


def test_next_batch_is_a_new_one(load: Load, library: Library) -> None:
    """A client that was told, and goes on by itself, is not stopped by the old fault later."""
    wrap, made = failing(2)
    llm = load(NAME, cache_mb=64, wrap_reader=wrap)
    assert raw.decode(llm, PROMPT, 0) == 0
    made[0].armed = True
    assert raw.decode(llm, TOKENS[0], len(PROMPT)) == ABORTED
    made[0].armed = False
    assert_right(llm, library)
    llm.check()


def test_fault_of_an_announced_batch_is_not_the_next_ones(load: Load, library: Library) -> None:
    wrap, made = failing(1)
    llm = load(NAME, cache_mb=0, wrap_reader=wrap, poison=True)
    made[0].armed = True
    with pytest.raises(ReadError):
        llm.eval(PROMPT)
    made[0].armed = False
    np.testing.assert_array_equal(raw.evaluate(llm, PROMPTS[0]), library.resident(NAME)[0])


@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("stop", STOPS)
def test_exception_at_every_stop(
    load: Load,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    stop: str,
    error: type[BaseException],
) -> None:
    dropping = {"cache_mb": 1, "force_cache": True, "drop_cold_experts": 1e-9}
    llm = load(NAME, poison=True, **(dropping if stop == "final_weights" else {"cache_mb": 0}))
    assert raw.decode(llm, PROMPT, 0) == 0
    stream = llm.streamed.stream
    raising = RaisingStop(getattr(stream, stop), error, call=3)
    monkeypatch.setattr(stream, stop, raising)
    assert raw.decode(llm, TOKENS[0], len(PROMPT)) == ABORTED
    assert raising.calls == 3  # the graph ended there: no further stop
    with pytest.raises(error):
        llm.check()
    monkeypatch.undo()
    assert_right(llm, library)


def test_callback_cut_short_is_noticed(
    load: Load, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda what: None)
    monkeypatch.setattr(engine, "EvalCallback", CutShort)
    llm = load(NAME, cache_mb=0)
    llm.streamed.callback.armed = True
    assert raw.decode(llm, PROMPT, 0) == ABORTED
    llm.streamed.callback.armed = False
    with pytest.raises(KeyboardInterrupt):
        llm.check()
    assert_right(llm, library)


def test_interrupt(load: Load, library: Library) -> None:
    """A real SIGINT that arrives while the evaluation thread waits for a lane."""
    llm = load(NAME, cache_mb=0)
    interrupt_next_read(llm)
    assert raw.decode(llm, PROMPT, 0) == ABORTED
    with pytest.raises(KeyboardInterrupt):
        llm.check()
    assert_right(llm, library)


def test_fault_in_a_later_ubatch(load: Load) -> None:
    """llama.cpp keeps the ubatches that were evaluated before, and says so in its header."""
    wrap, made = failing(1)
    llm = load(NAME, n_ubatch=8, cache_mb=0, wrap_reader=wrap)
    llm.streamed.stream.end = lambda: setattr(made[0], "armed", True)  # the first ubatch is over
    assert raw.decode(llm, PROMPT, 0) == ABORTED
    assert raw.next_position(llm) == 8


class Watcher(Policy):
    """Notes how it was called."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def begin(self, phase: str, position: int) -> None:
        self.events.append(("begin", phase, position))

    def end(self) -> None:
        self.events.append(("end",))


def test_batches_begin_and_end(load: Load) -> None:
    """One row after others is a decode; each batch is ended when the next one begins."""
    watcher = Watcher()
    llm = with_budget(load, NAME, 0.2, policies=[watcher], poison=True)
    raw.decode(llm, PROMPT, 0)
    raw.decode(llm, TOKENS[0], len(PROMPT))
    raw.decode(llm, TOKENS[1], len(PROMPT) + 1)
    with llm.decoding():
        raw.decode(llm, TOKENS[2] + TOKENS[3], len(PROMPT) + 2)
    raw.clear(llm)
    raw.decode(llm, PROMPT[:1], 0)
    llm.eval(PROMPT)
    assert watcher.events == [
        ("begin", "prefill", 0),
        ("end",),
        ("begin", "decode", len(PROMPT)),
        ("end",),
        ("begin", "decode", len(PROMPT) + 1),
        ("end",),
        ("begin", "decode", len(PROMPT) + 2),
        ("end",),
        ("begin", "prefill", 0),
        ("end",),
        ("begin", "prefill", 0),
        ("end",),
    ]


def test_counters_are_of_batches_that_were_announced(load: Load) -> None:
    llm = load(NAME, cache_mb=0)
    raw.decode(llm, PROMPT, 0)
    before = llm.source.lanes.reads
    raw.clear(llm)
    llm.eval(PROMPT)
    assert before and llm.counters.prefill.reads == llm.source.lanes.reads - before
    assert llm.counters.prefill.tokens == len(PROMPT)


def test_another_abort_callback(load: Load) -> None:
    """A client that installs its own is not told by `llama_decode`, but `check` still raises."""
    wrap, made = failing(1)
    llm = load(NAME, cache_mb=0, wrap_reader=wrap, poison=True)
    never = llama_cpp.ggml_abort_callback(lambda _data: False)
    llama_cpp.llama_set_abort_callback(llm.ctx, never, None)
    made[0].armed = True
    assert raw.decode(llm, PROMPT, 0) == 0
    with pytest.raises(ReadError):
        llm.check()


# --- what counts as decode in the class's own methods ---


def phases(llm: Llama) -> tuple[int, int]:
    counters = llm.counters
    return counters.prefill.tokens, counters.decode.tokens


def test_own_loops_count_as_decode(load: Load) -> None:
    llm = load(NAME, cache_mb=64)
    llm.eval(PROMPT)
    for token in TOKENS[:3]:
        llm.eval(token)
    assert phases(llm) == (len(PROMPT), 3)
    llm.eval(PROMPT)
    with llm.decoding():
        llm.eval(PROMPT)
    assert phases(llm) == (2 * len(PROMPT), 3 + len(PROMPT))
    assert llm.phase is None


def test_a_prompts_last_row_is_prefill(load: Load) -> None:
    """`generate` evaluates only what the context does not hold: here one row."""
    llm = load(NAME, cache_mb=64)
    llm.eval(PROMPT[:-1])
    generated = llm.generate(PROMPT, temp=0)
    next(generated)
    assert phases(llm) == (len(PROMPT), 0)
    next(generated)
    assert phases(llm) == (len(PROMPT), 1)
    generated.close()
    assert llm.phase is None
