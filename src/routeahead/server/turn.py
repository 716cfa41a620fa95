"""One answer as a job: what the evaluation thread does for a request, as a series of events.

Both APIs make their requests into a `Turn` and write these events in their own form.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from routeahead.chat.calls import read_calls
from routeahead.chat.generation import Ask, Finish, Generation, Sampling, TokenLogprob
from routeahead.chat.segments import Kind, Parts
from routeahead.chat.template import ChatTemplate, Message
from routeahead.chat.tools import grammar_of, schema_of_calls
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError
from routeahead.server.prompt_cache import PromptCache


@dataclass(frozen=True)
class Started:
    """The prompt was accepted: its tokens, and how many of them need not be evaluated."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Delta:
    """More of the answer's text or reasoning; the text may be empty."""

    kind: Kind
    text: str
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Call:
    """A call of a tool, its arguments as JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])


@dataclass(frozen=True)
class Done:
    """The answer has ended: why, after how many tokens, and by which stop text."""

    finish: Finish
    tokens: int
    called: bool = False
    stopped_by: str | None = None


Event = Started | Delta | Call | Done


@dataclass(frozen=True)
class Turn:
    """What a request asks for.

    Attributes:
        messages: a conversation; None if `prompt` is given instead.
        prompt: text or token ids to continue.
        tools: what may be called, in the form of OpenAI's API.
        demanded: the tools of which one must be called; empty if the model chooses.
        schema: JSON schema that the answer has to satisfy.
        template: variables for the chat template.
    """

    sampling: Sampling
    limit: int | None
    stop: Sequence[str]
    logprobs: int | None = None
    messages: Sequence[Message] | None = None
    prompt: str | Sequence[int] = ""
    tools: Sequence[Any] = ()
    demanded: Sequence[Any] = ()
    schema: Mapping[str, Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


class Turns:
    """Answers turns with one model."""

    def __init__(self, llm: Llama, prompts: PromptCache | None) -> None:
        self._template, self._prompts = ChatTemplate(llm), prompts

    def answer(self, llm: Llama, turn: Turn) -> Iterator[Event | None]:
        """The work of one turn. It gives None where nothing has happened but a stop is possible.

        Raises:
            SettingsError: the request cannot be answered.
        """
        schema = schema_of_calls(turn.demanded) if turn.demanded else turn.schema
        grammar = grammar_of(schema) if schema is not None else None
        tokens, thinking = self._prompt(llm, turn)
        if self._prompts:
            self._prompts.restore(llm, tokens)
        free = turn.messages is not None and grammar is None
        calls = free and bool(turn.tools)
        shown = self._template.shown(calls=calls) if free else frozenset()
        ask = Ask(tokens, turn.sampling, turn.limit, turn.stop, grammar, turn.logprobs, shown)
        generation = Generation(llm, ask)
        yield Started(generation.prompt_tokens, generation.cached_tokens)
        if turn.demanded:
            yield from _demanded(generation)
            return
        parts = self._template.parts(
            reasoning=free, calls=calls, thinking=thinking and grammar is None
        )
        called = False
        for event in _deltas(generation, parts, turn.tools):
            called |= isinstance(event, Call)
            yield event
        yield Done(generation.finish, len(generation.tokens), called, generation.stopped_by)

    def _prompt(self, llm: Llama, turn: Turn) -> tuple[Sequence[int], bool]:
        if turn.messages is not None:
            prompt = self._template.prompt(turn.messages, turn.tools, turn.template)
            return prompt.tokens, prompt.thinking
        if not isinstance(turn.prompt, str):
            strange = [token for token in turn.prompt if not 0 <= token < llm.n_vocab()]
            if strange:
                what = f"{strange[0]} is not one of {llm.n_vocab()} token ids"
                raise SettingsError(f"the prompt: {what}")
            return turn.prompt, False
        try:
            data = turn.prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise SettingsError("the prompt holds half of a surrogate pair") from None
        return llm.tokenize(data, add_bos=True, special=True), False

    def count(self, llm: Llama, turn: Turn) -> Iterator[Event]:
        """The work of counting a prompt's tokens."""
        yield Started(len(self._prompt(llm, turn)[0]), 0)


def _deltas(generation: Generation, parts: Parts, tools: Sequence[Any]) -> Iterator[Event | None]:
    for piece in generation.pieces():
        logprobs = [piece.logprob] if piece.logprob else []
        for segment in parts.feed(piece.text):
            yield from _events(segment.kind, segment.text, logprobs, tools)
            logprobs = []
        yield Delta("text", "", logprobs) if logprobs else None
    for segment in parts.close():
        yield from _events(segment.kind, segment.text, [], tools)


def _events(
    kind: Kind, text: str, logprobs: Sequence[TokenLogprob], tools: Sequence[Any]
) -> Iterator[Event]:
    """A part's events; what looked like a call and is none is text."""
    calls = read_calls(text, tools) if kind == "call" else []
    if calls:
        yield from (Call(*call) for call in calls)
    else:
        yield Delta("text" if kind == "call" else kind, text, logprobs)


def _demanded(generation: Generation) -> Iterator[Event | None]:
    """The whole answer is one call; what was cut off before it was complete is text."""
    text = ""
    for piece in generation.pieces():
        text += piece.text
        yield None
    yield from _events("call", text, [], ())
    yield Done(generation.finish, len(generation.tokens), called=bool(read_calls(text)))
