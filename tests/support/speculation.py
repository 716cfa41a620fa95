"""Drafts made for tests, and what a run with drafts evaluated and drew."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

from routeahead import Llama
from support.reference import Logits, Resident

Ids = npt.NDArray[np.int32]


class Fortune(LlamaDraftModel):
    """Drafts from a text that may be what comes, of any length up to `longest`, often none; now
    and then one of the tokens is another."""

    def __init__(self, text: Sequence[int], *, longest: int = 6, seed: int = 0) -> None:
        self._text, self._longest, self._random = list(text), longest, random.Random(seed)

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids:
        at, draw = len(input_ids), self._random
        draft = self._text[at : at + draw.randint(0, self._longest)]
        if draft and draw.random() < 0.4:
            draft[draw.randrange(len(draft))] = draw.randint(3, 250)
        return np.array(draft, np.intc)


@dataclass
class Spy:
    """What a model evaluates and draws from.

    Attributes:
        batches: (position of the first token, tokens) of each batch.
        drawn: (number of the batch, row in it, that row's logits, the token) of each token.
    """

    batches: list[tuple[int, list[int]]] = field(default_factory=list)
    drawn: list[tuple[int, int, npt.NDArray[np.float32], int]] = field(default_factory=list)

    def watch(self, llm: Llama) -> Spy:
        decode, sample = llm._plain_decode, llm._sample

        def decoding(batch: Any) -> None:
            of = batch.batch
            self.batches.append((of.pos[0], [of.token[row] for row in range(of.n_tokens)]))
            decode(batch)

        def sampling(*args: Any, **kwargs: Any) -> int:
            token = sample(*args, **kwargs)
            pointer = llm._ctx.get_logits_ith(llm.drawn_from)
            logits = np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy()
            row = len(self.batches[-1][1]) + llm.drawn_from
            self.drawn.append((len(self.batches) - 1, row, logits, token))
            return token

        llm._plain_decode, llm._sample = decoding, sampling  # type: ignore[method-assign]
        return self

    def assert_as(self, resident: Resident) -> None:
        """The logits of every row that was drawn from are the resident model's, bit by bit, in the
        same batches."""
        rows: list[Logits] = []
        for number, (at, tokens) in enumerate(self.batches):
            if number and at:
                rows.append(resident.rows(tokens, at))
            else:
                rows.append(resident.evaluate([tokens]))  # a prompt, of its last row alone
        for number, row, logits, _ in self.drawn:
            np.testing.assert_array_equal(logits, rows[number][row if len(rows[number]) > 1 else 0])


def text(llm: Llama, prompt: Sequence[int], count: int, **sampling: Any) -> list[int]:
    """The first `count` tokens of an answer."""
    tokens: list[int] = []
    steps = llm.generate(list(prompt), **sampling)
    for token in steps:
        tokens.append(token)
        if len(tokens) == count:
            break
    steps.close()
    return tokens
