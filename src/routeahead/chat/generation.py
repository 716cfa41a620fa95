"""One answer: tokens of a prompt in, pieces of text out."""

from __future__ import annotations

import codecs
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import llama_cpp
import numpy as np
from llama_cpp.llama_grammar import LlamaGrammar

from routeahead.chat.segments import withheld
from routeahead.chat.tools import check_grammar
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError

Finish = Literal["stop", "length", "cut"]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; the defaults are llama.cpp's.

    Attributes:
        temperature: 0 takes the likeliest token.
        seed: None for another answer each time.
        logit_bias: token → what is added to its logit.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """What to generate.

    Attributes:
        tokens: the prompt's ids.
        limit: tokens at most; None for what the context holds.
        stop: texts that end the answer and are no part of it.
        grammar: what the answer has to satisfy, in GBNF.
        logprobs: how many alternatives to report of each token; None for no probabilities.
        shown: control tokens that are given as text; others are none.
    """

    tokens: Sequence[int]
    sampling: Sampling = Sampling()
    limit: int | None = None
    stop: Sequence[str] = ()
    grammar: str | None = None
    logprobs: int | None = None
    shown: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its natural log probability before sampling, and the likeliest alternatives."""

    token: str
    data: bytes
    logprob: float
    top: Sequence[tuple[str, bytes, float]]


@dataclass(frozen=True)
class Piece:
    """What one evaluation brought: text, which may be empty, and the token's probability."""

    text: str
    logprob: TokenLogprob | None = None


class Generation:
    """An answer being generated. Closing the iterator of its pieces stops it.

    An empty piece is given after each batch of the prompt, so that its consumer may stop there.

    Attributes:
        prompt_tokens: in the prompt.
        cached_tokens: those of them that were in the context already.
        tokens: generated so far.
        finish: why it ended; "cut" while it has not.
        stopped_by: the stop text that ended it; None if none did.
    """

    def __init__(self, llm: Llama, ask: Ask) -> None:
        """
        Raises:
            SettingsError: the prompt is empty or leaves no room, or llama.cpp cannot do the rest.
        """
        self._llm, self._ask = llm, ask
        self.prompt_tokens = len(ask.tokens)
        room = llm.room - self.prompt_tokens
        if not ask.tokens:
            raise SettingsError("the prompt is empty: give some text")
        if room < 1:
            raise SettingsError(
                f"the prompt has {self.prompt_tokens} tokens and the context {llm.room}: "
                "shorten it, or start with a larger context (-c)"
            )
        if ask.grammar:
            check_grammar(ask.grammar, llm.model)
        self._bias = _bias(ask.sampling.logit_bias, llm.n_vocab())
        self._limit = room if ask.limit is None else min(ask.limit, room)
        self.cached_tokens = min(common_prefix(llm, ask.tokens), self.prompt_tokens - 1)
        self.tokens: list[int] = []
        self.finish: Finish = "cut"
        self.stopped_by: str | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._vocabulary = llama_cpp.llama_model_get_vocab(llm.model)

    def pieces(self) -> Generator[Piece, None, None]:
        """The answer as it comes. To be called once."""
        for _ in self._read_prompt():
            yield Piece("")
        llm, pending, stop = self._llm, "", tuple(self._ask.stop)
        steps = self._steps()
        try:
            for token in steps:
                if llama_cpp.llama_vocab_is_eog(self._vocabulary, token):
                    self.finish = "stop"
                    break
                logprob = self._logprob(token)
                before = self.tokens[-1] if self.tokens else self._ask.tokens[-1]
                self.tokens.append(token)
                special = token in self._ask.shown
                data = llm.detokenize([token], prev_tokens=[before], special=special)
                pending += self._decoder.decode(data)
                found = [(at, text) for text in stop if (at := pending.find(text)) >= 0]
                if found:
                    at, self.stopped_by = min(found)
                    self.finish = "stop"
                    yield Piece(pending[:at], logprob)
                    return
                keep = withheld(pending, stop)
                ready, pending = pending[: len(pending) - keep], pending[len(pending) - keep :]
                yield Piece(ready, logprob)
                if len(self.tokens) >= self._limit:
                    self.finish = "length"
                    break
        finally:
            steps.close()
        yield Piece(pending + self._decoder.decode(b"", final=True))

    def _read_prompt(self) -> Iterator[None]:
        """Evaluates all of the prompt but its last batch, batch by batch.

        Each call evaluates what the context lacks of a longer beginning of the prompt; the token
        that it samples is dropped. Lanes read for the next batch while the consumer has the turn.
        """
        llm, tokens = self._llm, self._ask.tokens
        for end in range(self.cached_tokens + llm.n_batch, self.prompt_tokens, llm.n_batch):
            step = llm.generate(tokens[:end], temp=0.0)
            with llm.prompt(self.prompt_tokens):
                next(step)
            step.close()
            yield

    def _steps(self) -> Any:
        sampling = self._ask.sampling
        seed = random.getrandbits(32) if sampling.seed is None else sampling.seed
        self._llm.set_seed(seed % (1 << 32))
        return self._llm.generate(
            self._ask.tokens,
            temp=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repeat_penalty=sampling.repeat_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logits_processor=self._bias,
            grammar=LlamaGrammar.from_string(self._ask.grammar) if self._ask.grammar else None,
        )

    def _logprob(self, token: int) -> TokenLogprob | None:
        if self._ask.logprobs is None:
            return None
        row = llama_cpp.llama_get_logits_ith(self._llm.ctx, self._llm.drawn_from)
        logits = np.ctypeslib.as_array(row, shape=(self._llm.n_vocab(),))
        scores = llama_cpp.Llama.logits_to_logprobs(logits)
        likeliest = np.argsort(-scores, kind="stable")[: self._ask.logprobs].tolist()
        return TokenLogprob(
            *self._named(token),
            float(scores[token]),
            [(*self._named(other), float(scores[other])) for other in likeliest],
        )

    def _named(self, token: int) -> tuple[str, bytes]:
        data = self._llm.detokenize([token], prev_tokens=[token], special=True)
        return data.decode("utf-8", "replace"), data


def common_prefix(llm: Llama, tokens: Sequence[int]) -> int:
    """How many of a prompt's first tokens the context holds."""
    held = llm.input_ids[: min(llm.n_tokens, len(tokens))]
    differs = np.flatnonzero(held != np.asarray(tokens[: len(held)], dtype=held.dtype))
    return int(differs[0]) if len(differs) else len(held)


def _bias(biases: Mapping[int, float], n_vocab: int) -> Any:
    if not biases:
        return None
    if strange := [token for token in biases if not 0 <= token < n_vocab]:
        raise SettingsError(f"logit_bias: {strange[0]} is not one of {n_vocab} token ids")

    def add(_: Any, scores: Any) -> Any:
        biased = scores.copy()
        for token, bias in biases.items():
            biased[token] += bias
        return biased

    return llama_cpp.LogitsProcessorList([add])
