"""Runs a loaded model on one piece of what it is graded on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np

from routeahead.engine.llama import Llama
from routeahead.errors import StreamError
from routeahead.evaluation.corpus import Chunk, Opening, Piece, Question, Vocabulary
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
    """Logits, float32 [vocabulary], after each token, from an empty context, one decode a token.

    They are valid until the next are asked for.
    """
    llm.reset()
    llm.phase = "decode"
    try:
        for token in tokens:
            llm.eval([token])
            yield last_logits(llm)
    finally:
        llm.phase = "prefill"


def greedy(llm: Llama, prompt: Sequence[int], *, through_decode: bool) -> Iterator[int]:
    """Greedy continuation of `prompt` from an empty context, up to the model's end of text.

    The prompt is one prefill; with `through_decode` each of its tokens is one decode.
    """
    llm.reset()
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
    """The last logits, float32 [vocabulary].

    They lie in the context's memory: the next batch overwrites them.

    Raises:
        StreamError: they are not finite.
    """
    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    logits: Logits = np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),))
    if not np.isfinite(logits).all():
        raise StreamError(f"the logits after token {llm.n_tokens} are not finite")
    return logits


def graded(
    llm: Llama,
    piece: Piece,
    through_decode: bool,
    tick: Tick,
    *,
    keep: Callable[[Logits], None] | None = None,
    baseline: Logits | None = None,
) -> dict[str, Any]:
    """Runs one piece. Of a chunk, `keep` takes each token's logits, or `baseline` has those to
    compare with, float32 [tokens, vocabulary]."""
    if isinstance(piece, Question):
        return answer(llm, piece, through_decode, tick)
    if isinstance(piece, Opening):
        return generate(llm, piece, through_decode, tick)
    if keep:
        return record_chunk(llm, piece, keep, tick)
    assert baseline is not None
    return grade_chunk(llm, piece, baseline, tick)


def record_chunk(
    llm: Llama, chunk: Chunk, keep: Callable[[Logits], None], tick: Tick
) -> dict[str, Any]:
    """Runs the baseline, and hands each token's logits to `keep`.

    Returns `nll` in nats [tokens].
    """
    nll = []
    graded = zip(logits_of_each(llm, chunk.inputs), chunk.targets, strict=True)
    for count, (logits, target) in enumerate(graded, start=1):
        keep(logits)
        nll.append(float(-log_softmax(logits)[target]))
        tick(count)
    return {"nll": nll}


def grade_chunk(llm: Llama, chunk: Chunk, baseline: Logits, tick: Tick) -> dict[str, Any]:
    """Runs a setting: `nll`, `kl` and `agrees` [tokens], as in `quality.TokenScore`.

    `baseline` has the baseline's logits [tokens, vocabulary].
    """
    scores = []
    graded = zip(baseline, logits_of_each(llm, chunk.inputs), chunk.targets, strict=True)
    for count, (reference, logits, target) in enumerate(graded, start=1):
        scores.append(score_token(reference, logits, target))
        tick(count)
    nll, kl, agrees = zip(*scores, strict=True)
    return {"nll": nll, "kl": kl, "agrees": agrees}


def answer(llm: Llama, question: Question, through_decode: bool, tick: Tick) -> dict[str, Any]:
    """Generates until it is certain whether the answer was given."""
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
    """Generates `opening.limit` tokens, or fewer if the model ends its text."""
    tokens = []
    generated = greedy(llm, opening.prompt, through_decode=through_decode)
    for token in islice(generated, opening.limit):
        tokens.append(token)
        tick(len(opening.prompt) + len(tokens))
    return {"tokens": tokens}
