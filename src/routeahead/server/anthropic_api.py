"""Anthropic's Messages API: its requests as turns, and a turn's events in its form."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from routeahead.chat.generation import Sampling
from routeahead.server.errors import ApiError, body_of
from routeahead.server.openai_api import Finite, text_of
from routeahead.server.turn import Call, Delta, Done, Event, Started, Turn


class Tool(BaseModel, extra="allow"):
    name: str
    description: str = ""
    input_schema: dict[str, Any] | None = None


class Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class Thinking(BaseModel, extra="allow"):
    type: str


class CountRequest(BaseModel):
    """/v1/messages/count_tokens. Unknown fields are ignored."""

    messages: list[Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def turn(self) -> Turn:
        return Turn(Sampling(), None, (), **self.conversation())

    def conversation(self) -> dict[str, Any]:
        """Messages, tools and what is demanded of them, as `Turn` takes them.

        Raises:
            ApiError: a block cannot be read, or a tool is demanded that is not there.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            messages += _messages(message)
        tools = [_tool(tool) for tool in self.tools or []]
        kind = self.tool_choice.type if self.tool_choice else "auto"
        demanded = tools if kind == "any" else ()
        if self.tool_choice and kind == "tool":
            name = self.tool_choice.name
            demanded = [tool for tool in tools if tool["function"]["name"] == name]
        if kind in ("any", "tool") and not demanded:
            raise ApiError(400, "tool_choice: demands a tool that is not among tools")
        off = self.thinking is not None and self.thinking.type == "disabled"
        return {
            "messages": messages,
            "tools": [] if kind == "none" else tools,
            "demanded": demanded,
            "template": {"enable_thinking": False} if off else {},
        }


class MessagesRequest(CountRequest):
    """/v1/messages."""

    max_tokens: int = Field(ge=1)
    temperature: Finite | None = Field(None, ge=0, le=100)
    top_p: Finite | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    stop_sequences: Annotated[list[str], Field(max_length=16)] = []
    stream: bool = False

    def turn(self) -> Turn:
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
        stop = [text for text in self.stop_sequences if text]
        return Turn(sampling, self.max_tokens, stop, **self.conversation())


def _text(content: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(text_of(block) for block in content)


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description}
    return {
        "type": "function",
        "function": {**function, "parameters": tool.input_schema or {"type": "object"}},
    }


def _messages(message: Message) -> Iterator[dict[str, Any]]:
    """A message's blocks as messages of OpenAI's API: results of tools stand alone there."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    text, calls = "", []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_result":
            content = _text(block.get("content") or "")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            text += text_of(block)
    if text or calls:
        yield {"role": message.role, "content": text, **({"tool_calls": calls} if calls else {})}


class Writer:
    """One response: collects events, or writes them as they come."""

    def __init__(self, model: str) -> None:
        self._head = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._open: str | None = None  # type of the block that is being written
        self._index = -1

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The response that is not streamed."""
        blocks: list[dict[str, Any]] = []
        started, done = Started(0, 0), Done("cut", 0)
        for event in events:
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Done):
                done = event
            elif isinstance(event, Call):
                blocks.append({**_tool_use(event), "input": _object(event.arguments)})
            else:
                _append(blocks, event)
        usage = {**_input(started), "output_tokens": done.tokens}
        return {**self._head, "content": blocks, **_stop(done), "usage": usage}

    async def stream(self, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """Server-sent events. A failure ends them with an error."""
        try:
            async for event in events:
                for name, content in self._written(event):
                    yield f"event: {name}\ndata: {json.dumps({'type': name, **content})}\n\n"
        except ApiError as error:
            content = body_of(error.status, str(error), "/v1/messages")
            yield f"event: error\ndata: {json.dumps(content)}\n\n"

    def _written(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(event, Started):
            usage = {**_input(event), "output_tokens": 0}
            message: dict[str, Any] = {
                **self._head,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
            }
            yield "message_start", {"message": {**message, "usage": usage}}
        elif isinstance(event, Done):
            yield from self._stop_block()
            yield (
                "message_delta",
                {"delta": _stop(event), "usage": {"output_tokens": event.tokens}},
            )
            yield "message_stop", {}
        elif isinstance(event, Call):
            yield from self._stop_block()
            yield from self._start_block("tool_use", {**_tool_use(event), "input": {}})
            delta = {"type": "input_json_delta", "partial_json": event.arguments}
            yield "content_block_delta", {"index": self._index, "delta": delta}
            yield from self._stop_block()
        elif event.text:
            kind = _block_of(event)
            if self._open != kind:
                yield from self._stop_block()
                yield from self._start_block(kind, _empty(kind))
            delta = {"type": f"{kind}_delta", kind: event.text}
            yield "content_block_delta", {"index": self._index, "delta": delta}

    def _start_block(self, kind: str, block: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        self._open, self._index = kind, self._index + 1
        yield "content_block_start", {"index": self._index, "content_block": block}

    def _stop_block(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._open:
            self._open = None
            yield "content_block_stop", {"index": self._index}


def _block_of(delta: Delta) -> str:
    return "thinking" if delta.kind == "reasoning" else "text"


def _empty(kind: str) -> dict[str, Any]:
    return {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}


def _append(blocks: list[dict[str, Any]], delta: Delta) -> None:
    kind = _block_of(delta)
    if not delta.text:
        return
    if not blocks or blocks[-1]["type"] != kind:
        blocks.append(_empty(kind))
    blocks[-1][kind] += delta.text


def _tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name}


def _object(arguments: str) -> Any:
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _input(started: Started) -> dict[str, int]:
    return {
        "input_tokens": started.prompt_tokens - started.cached_tokens,
        "cache_read_input_tokens": started.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _stop(done: Done) -> dict[str, Any]:
    reason = "end_turn" if done.finish == "stop" else "max_tokens"
    if done.called:
        reason = "tool_use"
    elif done.stopped_by is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": done.stopped_by}
