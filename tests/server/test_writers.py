"""A turn's events in the form of each API: reasoning, text and calls that a model chose itself."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the extra `serve` is not installed")

from routeahead import Llama
from routeahead.chat.generation import Ask, Generation, Sampling
from routeahead.chat.template import ChatTemplate
from routeahead.chat.tools import grammar_of, schema_of_calls
from routeahead.errors import SettingsError
from routeahead.models import DEFAULT_MODEL
from routeahead.server import anthropic_api, openai_api
from routeahead.server.errors import ApiError
from routeahead.server.turn import Call, Delta, Done, Event, Started

EVENTS: list[Event] = [
    Started(10, 4),
    Delta("reasoning", "hm"),
    Delta("reasoning", "m"),
    Delta("text", "I ask"),
    Call("f", '{"a": 1}', "1"),
    Call("g", "{}", "2"),
    Done("stop", 9, called=True),
]
USAGE = {"prompt_tokens": 10, "completion_tokens": 9, "total_tokens": 19}


async def _given(error: ApiError | None = None) -> AsyncIterator[Event]:
    for event in EVENTS[: 3 if error else None]:
        yield event
    if error:
        raise error


def written(writer: Any, error: ApiError | None = None) -> list[Any]:
    async def main() -> str:
        return "".join([part async for part in writer.stream(_given(error))])

    lines = asyncio.run(main()).splitlines()
    data = [line[6:] for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def test_openai() -> None:
    whole = openai_api.Writer("m", chat=True).whole(EVENTS)
    message = whole["choices"][0]["message"]
    assert message["content"] == "I ask" and message["reasoning_content"] == "hmm"
    assert [call["id"] for call in message["tool_calls"]] == ["call_1", "call_2"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["usage"] == {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}
    chunks = written(openai_api.Writer("m", chat=True, usage=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert [list(delta) for delta in deltas] == [
        ["role", "content"],
        ["reasoning_content"],
        ["reasoning_content"],
        ["content"],
        ["tool_calls"],
        ["tool_calls"],
        [],
    ]
    assert [d["tool_calls"][0]["index"] for d in deltas[4:6]] == [0, 1]
    assert chunks[-1]["usage"] == whole["usage"]
    last = written(openai_api.Writer("m", chat=True), ApiError(503, "cut"))[-1]
    assert last["error"]["message"] == "cut"


def test_anthropic() -> None:
    whole = anthropic_api.Writer("m").whole(EVENTS)
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0]["thinking"] == "hmm" and whole["content"][2]["input"] == {"a": 1}
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["input_tokens"] == 6 and whole["usage"]["cache_read_input_tokens"] == 4
    events = written(anthropic_api.Writer("m"))
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == kinds
    # Each block is begun, continued and ended under its own number.
    numbers = [event["index"] for event in events if "index" in event]
    assert numbers == sorted(numbers) and set(numbers) == {0, 1, 2, 3}
    assert [e["type"] for e in events].count("content_block_stop") == 4
    last = written(anthropic_api.Writer("m"), ApiError(503, "cut"))[-1]
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "cut"}}


@pytest.fixture(scope="module")
def llm() -> Any:
    made = Llama(DEFAULT_MODEL, n_ctx=512, n_batch=32, n_threads=1, resident=True)
    yield made
    made.close()


def test_a_tool_s_schema_may_refer_to_its_parts(llm: Llama) -> None:
    parameters = {
        "type": "object",
        "$defs": {"side": {"enum": ["left", "right"]}},
        "properties": {"side": {"$ref": "#/$defs/side"}, "text": {"type": "string"}},
        "required": ["side", "text"],
    }
    tools = [{"function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    grammar = grammar_of(schema_of_calls(tools))
    tokens = llm.tokenize(b"def f(x):\n")
    generation = Generation(llm, Ask(tokens, Sampling(temperature=0), 60, grammar=grammar))
    text = "".join(piece.text for piece in generation.pieces())
    side = r'"side" ?: ?"(left|right)", ?"text" ?: ?"[^\n]*'
    assert re.match(r'\{ ?"name" ?: ?"[fg]", ?"arguments" ?: ?\{ ?' + side, text), text


@pytest.mark.parametrize(
    "schema", [{"$ref": "#/nowhere"}, {"anyOf": 3}, {"type": "array", "maxItems": 10**6}]
)
def test_a_bad_schema_is_one_line(schema: Any) -> None:
    with pytest.raises(SettingsError, match=r"^schema: [^\n]*$"):
        grammar_of(schema)
    nested: Any = {"type": "string"}
    for _ in range(5000):
        nested = {"type": "array", "items": nested}
    with pytest.raises(SettingsError, match="nested too deeply"):
        grammar_of(nested)


def test_a_long_prompt_can_be_stopped_between_its_batches(llm: Llama) -> None:
    tokens = llm.tokenize(b"one two three four five six " * 20)
    assert len(tokens) > 3 * llm.n_batch
    llm.reset()
    before = llm.counters.prefill.tokens
    pieces = Generation(llm, Ask(tokens)).pieces()
    next(pieces)
    assert llm.counters.prefill.tokens - before == llm.n_batch
    pieces.close()
    # The rest is evaluated once, and what it says is what an uninterrupted prompt says.
    generation = Generation(llm, Ask(tokens, limit=4))
    assert generation.cached_tokens == llm.n_batch
    text = "".join(piece.text for piece in generation.pieces())
    assert llm.counters.prefill.tokens - before == len(tokens)
    assert llm.n_tokens == len(tokens) + 3 and text


def test_templates_that_know_tools_and_others(llm: Llama) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
    ]

    def text(template: str) -> str:
        llm.metadata["tokenizer.chat_template"] = template
        prompt = ChatTemplate(llm).prompt(asked, [tool])
        return llm.detokenize(prompt.tokens, special=True).decode()

    plain = text("{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}")
    assert plain.startswith("[system|You may call") and '"name": "f"' in plain
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in plain
    assert "[user|<tool_response>\ndone" in plain
    knows = text(
        "{{ tools[0].function.name }}{% for m in messages %}[{{ m.role }}|{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a + 1 }}{% endfor %}]{% endfor %}"
    )
    assert knows == "f[user|go][assistant|2][tool|done]"
    with pytest.raises(SettingsError, match="template refuses them: no tools here"):
        text("{{ raise_exception('no\ntools here') }}")
