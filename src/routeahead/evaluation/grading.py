"""Runs a loaded model over one piece of what it is graded on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np

from routeahead.engine.llama import Llama
from routeahead.errors import StreamError
from routeahead.evaluation.corpus import Chunk, Opening, Question, Vocabulary
from routeahead.evaluation.quality import (
    Logits,
    answer_is_decided,
    answer_matches,
    log_softmax,
    score_token,
)

Tick = Callable[[int], None]
"""Takes the number of a piece's tokens that have been evaluated."""


def logits_of_each(llm: Llama, tokens: Sequence[int]) -> Iterator[Logits]:
    """Logits, float32 [vocabulary], after each token, fed one at a time through decode from an
    empty context. A row is valid until the next is asked for."""
    llm.reset()  # type: ignore[no-untyped-call]
    llm.phase = "decode"
    try:
        for token in tokens:
            llm.eval([token])
            yield last_logits(llm)
    finally:
        llm.phase = "prefill"


def greedy(llm: Llama, prompt: Sequence[int], *, through_decode: bool) -> Iterator[int]:
    """Greedy continuation of `prompt` from an empty context, up to the model's end of text.

    The prompt is one prefill, or `through_decode` a decode for each token.
    """
    llm.reset()  # type: ignore[no-untyped-call]
    ends = Vocabulary(llm.model).ends
    try:
        llm.phase = "decode" if through_decode else "prefill"
        for batch in [[token] for token in prompt] if through_decode else [prompt]:
            llm.eval(batch)
        llm.phase = "decode"
        while not ends(token := int(np.argmax(last_logits(llm)))):
            yield token
            llm.eval([token])
    finally:
        llm.phase = "prefill"


def last_logits(llm: Llama) -> Logits:
    """The context's own memory, float32 [vocabulary]: overwritten by the next batch.

    Raises:
        StreamError: they are not finite, so no figure would mean anything.
    """
    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    row: Logits = np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),))
    if not np.isfinite(row).all():
        raise StreamError(f"the logits after token {llm.n_tokens} are not finite")
    return row


def record_chunk(
    llm: Llama, chunk: Chunk, keep: Callable[[Logits], None], tick: Tick
) -> dict[str, Any]:
    """The baseline's turn: hands each row of logits to `keep`; returns `nll` in nats [tokens]."""
    nll = []
    rows = zip(logits_of_each(llm, chunk.inputs), chunk.targets, strict=True)
    for count, (row, target) in enumerate(rows, start=1):
        keep(row)
        nll.append(float(-log_softmax(row)[target]))
        tick(count)
    return {"nll": nll}


def grade_chunk(llm: Llama, chunk: Chunk, baseline: Logits, tick: Tick) -> dict[str, Any]:
    """A setting's turn: `nll`, `kl` and `agrees` [tokens] (`quality.TokenScore`), beside the
    baseline's logits [tokens, vocabulary]."""
    scores = []
    rows = zip(baseline, logits_of_each(llm, chunk.inputs), chunk.targets, strict=True)
    for count, (reference, row, target) in enumerate(rows, start=1):
        scores.append(score_token(reference, row, target))
        tick(count)
    nll, kl, agrees = zip(*scores, strict=True)
    return {"nll": nll, "kl": kl, "agrees": agrees}


def answer(llm: Llama, question: Question, through_decode: bool, tick: Tick) -> dict[str, Any]:
    """Generates until it is decided whether the answer was given."""
    vocabulary, tokens, text = Vocabulary(llm.model), [], ""
    generated = greedy(llm, question.prompt, through_decode=through_decode)
    for token in islice(generated, question.limit):
        tokens.append(token)
        text = vocabulary.text(tokens)
        tick(len(question.prompt) + len(tokens))
        if answer_is_decided(text, question.answer):
            break
    right = answer_matches(text, question.answer)
    return {"kind": question.kind, "right": right, "text": text}


def generate(llm: Llama, opening: Opening, through_decode: bool, tick: Tick) -> dict[str, Any]:
    """Generates `opening.limit` tokens, or fewer where the model ends."""
    tokens = []
    generated = greedy(llm, opening.prompt, through_decode=through_decode)
    for token in islice(generated, opening.limit):
        tokens.append(token)
        tick(len(opening.prompt) + len(tokens))
    return {"tokens": tokens}
