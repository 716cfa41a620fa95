"""A prompt that comes in several calls: `chat` and `serve` may stop it between two batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.library import THREADS, Library, evaluate, with_budget
from support.readers import Delayed

from routeahead import Llama
from routeahead.chat.generation import Ask, Generation, Sampling
from routeahead.engine.streamed_model import Hooks
from routeahead.engine.ubatch import DEFAULT
from routeahead.errors import Stopped
from routeahead.experts.load import Load
from routeahead.types import Ids

UBATCH = 8
TOKENS = np.random.default_rng(1).integers(3, 259, size=60).tolist()


def in_batches(load: Callable[..., Llama], **settings: object) -> Llama:
    """A model without a cache, with two ubatches a batch."""
    llm = with_budget(load, "qwen3moe", 0, n_ubatch=UBATCH, **settings)
    llm.n_batch = 2 * UBATCH
    return llm


def answer(llm: Llama) -> Generation:
    return Generation(llm, Ask(TOKENS, Sampling(temperature=0), limit=2))


@pytest.mark.fast
def test_the_next_batch_is_read_while_the_consumer_has_the_turn(load: Callable[..., Llama]) -> None:
    """Each but the first finds experts of its first layer there."""
    llm = in_batches(load)
    source, first = llm.source, llm.layout.moe_layers[0]
    require, found, batch_begins = source.require, list[int](), True

    def count(layer: int, experts: Sequence[int], rows: Ids | None = None) -> Load | None:
        nonlocal batch_begins
        before = source.ahead.useful
        needed = require(layer, experts, rows)
        if batch_begins:
            assert layer == first
            found.append(source.ahead.useful - before)
        batch_begins = False
        return needed

    source.require = count  # type: ignore[method-assign]
    generation = answer(llm)
    for _ in generation.pieces():
        batch_begins = not generation.tokens
        while not all(guess.at_rest for guess in source._guesses._guesses.values()):
            time.sleep(0.001)  # until lanes have read what they were given
    assert found[0] == 0 < min(found[1:]) and len(found) == 4
    assert not source._guesses


@pytest.mark.fast
def test_what_was_read_for_a_batch_that_never_came(load: Callable[..., Llama]) -> None:
    """It is nobody's, and the next text is right."""
    llm, fresh = in_batches(load, poison=True), in_batches(load, poison=True)
    pieces = answer(llm).pieces()
    next(pieces)
    pieces.close()
    assert llm.source._guesses.any_ahead()
    other = [TOKENS[40:55], [7], [9]]
    np.testing.assert_array_equal(evaluate(llm, other), evaluate(fresh, other))
    assert not llm.source._guesses


@pytest.mark.fast
def test_the_last_layer_routes_the_row_whose_output_is_wanted(load: Callable[..., Llama]) -> None:
    """None of the ubatches before the last one: meanwhile lanes read for the next one."""
    llm = with_budget(load, "qwen3moe", 0, n_ubatch=UBATCH)
    window, (first, *_, last) = llm.streamed.stream._window, llm.layout.moe_layers
    routed, rows, goes_on = window.routed, dict[int, list[int]](), list[bool]()

    def note(layer: int, ids: Ids) -> None:
        rows.setdefault(layer, []).append(len(ids))
        routed(layer, ids)
        if layer == last:
            ahead = {at for at, _ in llm.source._guesses._guesses}
            goes_on.append(first in ahead and last not in ahead)

    window.routed = note  # type: ignore[method-assign]
    llm.eval(TOKENS[:30])
    assert rows.pop(last) == [0, 0, 0, 1]
    assert all(counts == [8, 8, 8, 6] for counts in rows.values())
    assert goes_on == [True, True, True, False]


def test_a_long_batch_ends_at_the_layer_where_nobody_wants_it(library: Library) -> None:
    """Lanes are reading for the next layers then. It leaves no trace, and short ones do not end."""
    path, prompt = (
        library.path("qwen3moe"),
        np.random.default_rng(4).integers(3, 259, 1011).tolist(),
    )
    given = {"n_ctx": 2048, "n_threads": THREADS, "cache_mb": 1, "force_cache": True}
    llm = Llama(path, **given, _hooks=Hooks(wrap_reader=Delayed, poison=True))
    fresh, stream, seen = Llama(path, **given), llm.streamed.stream, list[int]()
    routed = stream._window.routed

    def note(layer: int, ids: Ids) -> None:
        seen.append(layer)
        routed(layer, ids)

    stream._window.routed = note  # type: ignore[method-assign]
    with llm.stopping(lambda: len(seen) == 2):
        with pytest.raises(Stopped, match=f"at layer {llm.layout.moe_layers[2]}"):
            llm.eval(prompt)
        assert seen == llm.layout.moe_layers[:2]
        assert llm.n_tokens == 0 and not llm.source._guesses and not stream.unwanted
    with llm.stopping(lambda: True):
        llm.eval(prompt[:DEFAULT])
    assert llm.n_tokens == DEFAULT
    batches = [prompt, [7], [9]]
    np.testing.assert_array_equal(evaluate(llm, batches), evaluate(fresh, batches))
    llm.close()
    fresh.close()
