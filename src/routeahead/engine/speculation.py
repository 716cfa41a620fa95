"""Lossless speculation: tokens are guessed, evaluated together in one batch, and kept if the
sampler draws the same.

Such a batch has the token that was drawn last and the guesses that follow it, the *draft*. Its rows
are sampled from, in order, until one draws another token than the draft has; what is behind is
taken out of the KV cache. So what comes out is what the sampler draws from each row, never a guess,
and a layer reads the experts of all rows at once.

The idea is from Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
arXiv:2211.17192; drafts from the text itself are Saxena's "Prompt Lookup Decoding". The sampling
loop is llama-cpp-python's: it asks `Llama.draft_model` for drafts, and compares them with what it
draws.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel

from routeahead.engine.turns import TakingTurns
from routeahead.errors import SettingsError, UseError
from routeahead.types import Ids

if TYPE_CHECKING:
    from routeahead.engine.llama import Llama


_LONGEST = 32  # tokens at the end of the text that tell places apart


class PromptLookup(LlamaDraftModel):
    """Drafts what followed when the last tokens of the text occurred before."""

    def __init__(self, limit: int) -> None:
        """Drafts `limit` tokens at most."""
        self._limit = limit

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids:
        """What followed the longest ending of the text, int32 (n,), that occurred before, there the
        last time.

        What is wrong in a draft costs reads, so an ending has two tokens at least, and the draft is
        at most twice as long.
        """
        last, begin, length = len(input_ids) - 1, 0, 1
        if last < 1:
            return input_ids[:0]
        ends = np.flatnonzero(input_ids[:-1] == input_ids[-1])
        while length == 1 or 2 * length < self._limit or (len(ends) > 1 and length < _LONGEST):
            ends = ends[ends >= length]
            ends = ends[input_ids[ends - length] == input_ids[last - length]]
            if not len(ends):
                break
            begin, length = int(ends[-1]) + 1, length + 1
        if not begin:
            return input_ids[:0]
        # Text that repeats itself goes on doing so: a draft may go on into its own beginning.
        return np.resize(input_ids[begin:], min(self._limit, 2 * length))


class Drafts(LlamaDraftModel):
    """The drafts of another model, cut to what can be verified.

    Attributes:
        model: makes them.
    """

    def __init__(self, model: LlamaDraftModel, llm: Llama) -> None:
        """
        Drafts for `llm`, whose context is still empty.

        Raises:
            SettingsError: what is evaluated in vain could not be taken back.
        """
        self.model, self._llm = model, weakref.proxy(llm)
        memory = llama_cpp.llama_get_memory(llm.ctx)
        # Of an empty context nothing is removed: this asks whether a part of it could be.
        if not memory or not llama_cpp.llama_memory_seq_rm(memory, -1, 1, -1):
            raise SettingsError(
                f"{llm.layout.shards[0].path}: what {llm.layout.arch} keeps of a text cannot be "
                "cut back by some tokens, so wrong drafts cannot be taken back: leave out lookup "
                "and draft_model"
            )
        # In one ubatch, because a sliding window forgets between two what a wrong draft has passed.
        self._rows = min(llm.n_batch, int(llm.context_params.n_ubatch), len(llm.scores))

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids:
        """A draft for the text int32 (n,), the end of which is not evaluated yet.

        Raises:
            SettingsError: the model drafts what is no token.
        """
        waiting = len(input_ids) - self._llm.n_tokens
        limit = min(self._rows - waiting, self._llm.room - len(input_ids))
        draft = np.asarray(self.model(input_ids, **kwargs))[: max(0, limit)]
        if draft.ndim != 1 or (draft.size and draft.dtype.kind not in "iu"):
            raise SettingsError(
                f"draft_model made {draft.dtype} {draft.shape} of a draft: give token ids (n,)"
            )
        draft = draft.astype(np.intc)
        if draft.size and not 0 <= draft.min() <= draft.max() < self._llm.n_vocab():
            wrong = int(draft.max() if draft.min() >= 0 else draft.min())
            raise SettingsError(
                f"draft_model drafted token {wrong}, and there are {self._llm.n_vocab()}: give it "
                "a model with this one's vocabulary"
            )
        return draft


def draft_model(given: LlamaDraftModel | None, lookup: int) -> LlamaDraftModel | None:
    """What makes drafts, as the settings have it; None if nothing does.

    Raises:
        SettingsError: they name two.
    """
    if given and lookup:
        raise SettingsError("lookup and draft_model both make drafts: give one of them")
    return PromptLookup(lookup) if lookup else given


class Verifying(TakingTurns):
    """A `llama_cpp.Llama` that can have every row of a batch sampled from.

    llama_cpp.Llama does that too, if it knows of a draft model when it loads, but then it has the
    logits of all rows of all prompts computed, and loses them after `n_batch` tokens of context.

    Attributes:
        serial: number of the last batch.
        drawn_from: the row of it that was sampled last, as `llama_get_logits_ith` counts them.
    """

    serial = 0
    drawn_from = -1
    _verifying = False  # rows of the next batch are going to be sampled from
    _seen: int | None = None  # tokens of text that the sampler is told of; None: all

    def _number(self, batch: Any) -> int:
        """A batch begins; says how many rows it has."""
        self.serial += 1
        rows = int(batch.batch.n_tokens)
        if self._verifying:
            for row in range(rows):
                batch.batch.logits[row] = True
        return rows

    def _eval(self, tokens: Sequence[int]) -> None:
        if self._verifying and len(tokens) > self.n_batch:
            raise UseError(
                f"{len(tokens)} tokens are to be verified, and a batch has {self.n_batch}: send "
                "fewer, or raise n_batch"
            )
        super()._eval(tokens)

    def _sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        """A logits processor sees the text up to the row, and not the guesses behind it."""
        if idx is not None:
            self.drawn_from, self._seen = idx - self.n_tokens, idx + 1
        try:
            return super()._sample(*args, idx=idx, **kwargs)
        finally:
            self._seen = None

    @property
    def _input_ids(self) -> Ids:
        return self.input_ids[: self.n_tokens if self._seen is None else self._seen]


class Unverified:
    """The rows of a generator's last batch that have not been sampled from.

    While the generator rests, the context looks as if they had not been evaluated: whoever uses it
    then, or ends the generator, finds the text so far and nothing else.
    """

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._end = self._serial = 0  # tokens with those rows; the last batch's number
        self._place = -1  # where in the text the token that was drawn last stands

    def hide(self, token: int) -> None:
        """`token` was drawn from the row before them."""
        llm = self._llm
        self._place = self._place + 1 if self._place >= 0 else llm.n_tokens
        self._end, self._serial = llm.n_tokens, llm.serial
        if self._end > self._place:
            if llm.input_ids[self._place] == token:
                llm.accepted()
            llm.n_tokens, llm._requires_eval = self._place, True

    def show(self) -> None:
        """The generator goes on. If anybody has used the context, they are lost."""
        llm = self._llm
        if llm.n_tokens != self._place:
            self._place = -1  # it has another text now
        elif self._end > self._place and llm.serial == self._serial:
            llm.n_tokens, llm._requires_eval = self._end, False
