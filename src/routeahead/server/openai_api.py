"""OpenAI's API: its requests as turns, and a turn's events in its form."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from routeahead.chat.generation import Sampling, TokenLogprob
from routeahead.server.errors import ApiError
from routeahead.server.turn import Call, Delta, Done, Event, Started, Turn

Finite = Annotated[float, Field(allow_inf_nan=False)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else [] if value is None else value


class StreamOptions(BaseModel):
    include_usage: bool = False


class Common(BaseModel):
    """Fields of both kinds of requests. Unknown ones are ignored: clients send many."""

    temperature: Finite | None = Field(None, ge=0, le=100)
    top_p: Finite | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    min_p: Finite | None = Field(None, ge=0, le=1)
    repeat_penalty: Finite | None = Field(None, gt=0, le=100)
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    seed: int | None = None
    logit_bias: dict[int, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    stop: Annotated[list[str], BeforeValidator(_listed), Field(max_length=16)] = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = 1

    def sampling(self) -> Sampling:
        names = Sampling.__dataclass_fields__
        given = {name: getattr(self, name) for name in names}
        return Sampling(**{name: value for name, value in given.items() if value is not None})

    def turn(self) -> Turn:
        """
        Raises:
            ApiError: its fields do not go together.
        """
        raise NotImplementedError

    def stops(self) -> list[str]:
        return [text for text in self.stop if text]

    @property
    def usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextRequest(Common):
    """/v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]] = ""
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    suffix: None = None
    best_of: Literal[1] | None = None

    def turn(self) -> Turn:
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ApiError(400, "prompt: send one request for each of several prompts")
            prompt = prompt[0]
        if self.echo and not isinstance(prompt, str):
            raise ApiError(400, "echo: needs the prompt as text")
        return Turn(
            self.sampling(),
            self.max_tokens,
            self.stops(),
            self.logprobs,
            prompt=prompt,  # type: ignore[arg-type]
        )


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    def schema_of(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        schema = (self.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise ApiError(400, "response_format: json_schema needs an object named schema")
        return schema


class Function(BaseModel, extra="allow"):
    name: str
    parameters: dict[str, Any] | None = None


class Tool(BaseModel, extra="allow"):
    type: Literal["function"]
    function: Function


class CallFunction(BaseModel):
    name: str
    arguments: str = "{}"


class ToolCall(BaseModel, extra="allow"):
    function: CallFunction


class Message(BaseModel, extra="allow"):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None

    def plain(self) -> dict[str, Any]:
        """With its content as one text, as templates want it."""
        made = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            made["content"] = "".join(text_of(part) for part in self.content)
        made["role"] = "system" if self.role == "developer" else self.role
        return made


def text_of(part: dict[str, Any]) -> str:
    """The text of a part of a message.

    Raises:
        ApiError: it is none.
    """
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ApiError(
            400, f"messages: a part of type {part.get('type')!r}: only text is read here"
        )
    return str(part["text"])


class ChatRequest(Common):
    """/v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def turn(self) -> Turn:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []]
        return Turn(
            self.sampling(),
            self.max_completion_tokens or self.max_tokens,
            self.stops(),
            (self.top_logprobs or 0) if self.logprobs else None,
            messages=[message.plain() for message in self.messages],
            tools=[] if self.tool_choice == "none" else tools,
            demanded=_demanded(tools, self.tool_choice),
            schema=self.response_format.schema_of() if self.response_format else None,
            template=self.chat_template_kwargs or {},
        )


def _demanded(tools: Sequence[Any], choice: str | dict[str, Any] | None) -> Sequence[Any]:
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        found = tools
    elif isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        found = [tool for tool in tools if tool["function"]["name"] == name]
    else:
        raise ApiError(400, f"tool_choice: {choice!r} is neither auto, none, required nor a tool")
    if not found:
        raise ApiError(400, "tool_choice: demands a tool that is not among tools")
    return found


class Writer:
    """One response: collects events, or writes them as they come."""

    def __init__(self, model: str, *, chat: bool, usage: bool = False, echo: str = "") -> None:
        self._chat, self._usage, self._echo = chat, usage, echo
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }
        self._started = Started(0, 0)
        self._calls = 0

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The response that is not streamed."""
        text = {"text": self._echo, "reasoning": ""}
        calls: list[Any] = []
        logprobs: list[TokenLogprob] = []
        done = Done("cut", 0)
        for event in events:
            if isinstance(event, Started):
                self._started = event
            elif isinstance(event, Delta):
                text[event.kind] += event.text
                logprobs += event.logprobs
            elif isinstance(event, Call):
                calls.append(_call(event))
            else:
                done = event
        choice: dict[str, Any] = {"index": 0, "finish_reason": _finish(done)}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text["text"]}
            if text["reasoning"]:
                message["reasoning_content"] = text["reasoning"]
            if calls:
                message |= {"content": text["text"] or None, "tool_calls": calls}
            choice["message"] = message
        else:
            choice["text"] = text["text"]
        choice["logprobs"] = self._logprobs(logprobs)
        kind = "chat.completion" if self._chat else "text_completion"
        return {
            **self._head,
            "object": kind,
            "choices": [choice],
            "usage": self._usage_of(done),
        }

    async def stream(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """Server-sent events. A failure ends them with an error."""
        if self._chat:
            yield self._chunk({"role": "assistant", "content": ""})
        elif self._echo:
            yield self._chunk({"text": self._echo})
        try:
            async for event in events:
                if isinstance(event, Started):
                    self._started = event
                elif isinstance(event, Done):
                    yield self._chunk({}, _finish(event))
                    if self._usage:
                        usage = self._usage_of(event)
                        yield sse({**self._chunk_head(), "choices": [], "usage": usage})
                else:
                    yield self._delta(event)
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield sse({"error": {"message": str(error), "type": "server_error"}})

    def _delta(self, event: Delta | Call) -> str:
        if isinstance(event, Call):
            self._calls += 1
            return self._chunk({"tool_calls": [{"index": self._calls - 1, **_call(event)}]})
        logprobs = self._logprobs(event.logprobs)
        if not self._chat:
            return self._chunk({"text": event.text}, logprobs=logprobs)
        name = "reasoning_content" if event.kind == "reasoning" else "content"
        return self._chunk({name: event.text}, logprobs=logprobs)

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": logprobs}
        choice |= {"delta": delta} if self._chat else {"text": "", **delta}
        return sse({**self._chunk_head(), "choices": [choice]})

    def _chunk_head(self) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
        }

    def _logprobs(self, found: Sequence[TokenLogprob]) -> Any:
        if not found:
            return None
        if self._chat:
            return {"content": [_chat_logprob(one) for one in found], "refusal": None}
        return {
            "tokens": [one.token for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [{text: value for text, _, value in one.top} for one in found],
            "text_offset": [],
        }

    def _usage_of(self, done: Done) -> dict[str, Any]:
        prompt = self._started.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": done.tokens,
            "total_tokens": prompt + done.tokens,
            "prompt_tokens_details": {"cached_tokens": self._started.cached_tokens},
        }


def sse(content: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _finish(done: Done) -> str:
    return "tool_calls" if done.called else "stop" if done.finish == "stop" else "length"


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{call.id}", "type": "function", "function": function}


def _chat_logprob(one: TokenLogprob) -> dict[str, Any]:
    top = [{"token": text, "bytes": list(data), "logprob": value} for text, data, value in one.top]
    return {
        "token": one.token,
        "bytes": list(one.data),
        "logprob": one.logprob,
        "top_logprobs": top,
    }
