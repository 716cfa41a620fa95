"""The server's APIs, as clients use them over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
from support.servers import CHAT, COUNT, MESSAGES, TEXT, Server

from routeahead import Llama
from routeahead.models import DEFAULT_MODEL

pytestmark = pytest.mark.xdist_group("server")

SUM = "What is 12 + 30?"
NUMBER = "Translate to French: seven hundred ninety eight"
GREEDY = {"temperature": 0}  # of which the client knows nothing
ANSWER = "sept cent quatre-vingt-dix-huit"
USER = [{"role": "user", "content": SUM}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
TOOL = {"name": "add", "description": "adds", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("prompts"), "--cache-mb", 2) as running:
        yield running


def streamed(server: Server, path: str, **body: Any) -> list[Any]:
    """The JSON of each server-sent event."""
    done = server.post(path, stream=True, **body)
    assert done.status_code == 200, done.text
    assert done.headers["content-type"].startswith("text/event-stream")
    found = [line[6:] for line in done.text.splitlines() if line.startswith("data: ")]
    if path != MESSAGES:
        assert found.pop() == "[DONE]"
    return [json.loads(line) for line in found]


def test_an_answer_is_that_of_the_library(server: Server) -> None:
    llm = Llama(DEFAULT_MODEL, n_ctx=1024, n_threads=1, resident=True)
    try:
        messages: Any = [{"role": "user", "content": NUMBER}]
        there = llm.create_chat_completion(messages, temperature=0)
    finally:
        llm.close()
    here = server.ask(NUMBER)
    assert here["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}
    for part in ("message", "finish_reason"):
        assert here["choices"][0][part] == there["choices"][0][part]
    assert here["usage"]["prompt_tokens"] == there["usage"]["prompt_tokens"]
    assert here["usage"]["completion_tokens"] == there["usage"]["completion_tokens"]


def test_a_stream_is_the_whole_answer_in_pieces(server: Server) -> None:
    messages = [{"role": "user", "content": NUMBER}]
    options = {"stream_options": {"include_usage": True}, "temperature": 0}
    *chunks, usage = streamed(server, CHAT, messages=messages, **options)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert len(deltas) > 8
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] >= len(deltas) - 3
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1


def test_completions_stop_where_they_are_told(server: Server) -> None:
    prompt = f"{NUMBER}\nAnswer:"
    ask = {"prompt": prompt, "temperature": 0, "max_tokens": 20}
    whole = server.post(TEXT, **ask).json()["choices"][0]
    assert whole["text"].strip().startswith(ANSWER)
    # The text that stops lies across several tokens, and is no part of the answer.
    cut = server.post(TEXT, **ask, stop=["t-vingt", "-vingt-di"], echo=True).json()["choices"][0]
    assert cut["text"] == prompt + whole["text"].partition("-vingt-di")[0]
    assert cut["finish_reason"] == "stop"
    pieces = streamed(server, TEXT, **ask, stop="-vingt-di")
    assert "".join(p["choices"][0]["text"] for p in pieces) == cut["text"].removeprefix(prompt)
    short = server.post(TEXT, **{**ask, "max_tokens": 2}).json()
    assert short["choices"][0]["finish_reason"] == "length"
    assert short["usage"]["completion_tokens"] == 2
    tokens = server.post(TEXT, **{**ask, "prompt": [[11, 12, 13]]}).json()
    assert tokens["usage"]["prompt_tokens"] == 3


def test_logprobs_are_those_of_the_tokens(server: Server) -> None:
    done = server.ask(SUM, logprobs=True, top_logprobs=3)
    found = done["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in found) == "42"
    for one in found:
        top = [other["logprob"] for other in one["top_logprobs"]]
        assert one["logprob"] == top[0] == max(top) and len(top) == 3  # greedy takes the likeliest
        assert top == sorted(top, reverse=True) and -0.1 < top[0] <= 0 and top[1] < -1
    llm = Llama(DEFAULT_MODEL, n_ctx=512, n_threads=1, resident=True, logits_all=True)
    try:
        messages: Any = USER
        there = llm.create_chat_completion(messages, temperature=0, logprobs=True, top_logprobs=3)
    finally:
        llm.close()
    expected = [one["logprob"] for one in there["choices"][0]["logprobs"]["content"]]
    assert [one["logprob"] for one in found] == pytest.approx(expected, abs=1e-4)


def test_a_seed_repeats_an_answer_and_a_bias_changes_it(server: Server) -> None:
    hot = {"temperature": 50.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 12}

    def text(**more: Any) -> str:
        return str(server.ask("Tell", **hot, **more)["choices"][0]["message"]["content"])

    assert text(seed=7) == text(seed=7) != text(seed=8)
    assert len({text() for _ in range(3)}) == 3
    four = server.post(TEXT, prompt=" 4", temperature=0, max_tokens=1, logprobs=0).json()
    assert four["usage"]["prompt_tokens"] >= 1
    biased = server.ask(SUM, logit_bias={"0": 100}, max_tokens=3)  # token 0 ends the text
    assert biased["choices"][0]["message"]["content"] == ""


def test_an_answer_keeps_to_a_schema(server: Server) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "pair", "schema": PARAMETERS}}
    done = server.ask(SUM, response_format=asked, max_tokens=200)["choices"][0]
    found = json.loads(done["message"]["content"])
    assert done["finish_reason"] == "stop"
    assert isinstance(found["a"], int) and found["b"] in ("x", "y")


def test_an_answer_is_an_object(server: Server) -> None:
    vocabulary = llama_cpp.Llama(str(DEFAULT_MODEL), vocab_only=True, verbose=False)
    [brace] = vocabulary.tokenize(b"}", add_bos=False)
    likely = {str(brace): 100}  # what the model itself would put into it may have no end
    for form, answer in ({}, "}"), ({"response_format": {"type": "json_object"}}, "{}"):
        done = server.ask(SUM, logit_bias=likely, max_tokens=len(answer) + 1, **form)["choices"][0]
        assert done["message"]["content"][: len(answer)] == answer
    assert done["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_demanded_tool_is_called(server: Server, choice: Any) -> None:
    ask = {"tools": [FUNCTION], "tool_choice": choice, "max_tokens": 300}
    done = server.ask(SUM, **ask)["choices"][0]
    (call,) = done["message"]["tool_calls"]
    assert done["finish_reason"] == "tool_calls" and call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"])["b"] in ("x", "y")
    chunks = streamed(server, CHAT, messages=USER, temperature=0, **ask)
    calls = [c for k in chunks for c in k["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"] == call["function"] and calls[0]["index"] == 0
    # The next turn has the call and its result, in a template that knows neither.
    asked = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "42"},
    ]
    again = server.post(CHAT, messages=asked, tools=[FUNCTION], max_tokens=4)
    assert again.status_code == 200, again.text


def test_messages_of_the_other_api(server: Server) -> None:
    ask: dict[str, Any] = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": NUMBER}]}],
        "max_tokens": 30,
        "temperature": 0,
    }
    done = server.post(MESSAGES, **ask).json()
    assert done["content"] == [{"type": "text", "text": ANSWER}]
    assert done["stop_reason"] == "end_turn" and done["type"] == "message"
    usage = done["usage"]
    counted = server.post(COUNT, messages=ask["messages"]).json()["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    stopped = server.post(MESSAGES, **ask, stop_sequences=["-vingt"]).json()
    assert stopped["stop_reason"] == "stop_sequence" and stopped["stop_sequence"] == "-vingt"
    assert server.post(MESSAGES, **{**ask, "max_tokens": 2}).json()["stop_reason"] == "max_tokens"

    events = streamed(server, MESSAGES, **ask)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(deltas) == ANSWER and len(deltas) > 5
    assert events[-2]["usage"]["output_tokens"] == usage["output_tokens"]


def test_tools_of_the_other_api(server: Server) -> None:
    ask: dict[str, Any] = {"max_tokens": 300, "temperature": 0, "tools": [TOOL]}
    choice = {"type": "tool", "name": "add"}
    done = server.post(MESSAGES, messages=USER, tool_choice=choice, **ask).json()
    (block,) = done["content"]
    assert done["stop_reason"] == "tool_use" and block["input"]["b"] in ("x", "y")
    events = streamed(server, MESSAGES, messages=USER, tool_choice={"type": "any"}, **ask)
    (delta,) = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == block["input"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "42"}
    turns = [
        *USER,
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result, {"type": "text", "text": SUM}]},
    ]
    assert server.post(MESSAGES, messages=turns, **ask).status_code == 200


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages: Field required"),
    (CHAT, {"messages": []}, "messages: List should have at least 1 item"),
    (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages.0.role: "),
    (CHAT, {"messages": USER, "temperature": -1}, "temperature: "),
    (CHAT, {"messages": USER, "temperature": float("nan")}, "temperature: "),
    (CHAT, {"messages": USER, "n": 2}, "n: "),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens: "),
    (CHAT, {"messages": USER, "logit_bias": {"999999": 1}}, "logit_bias: 999999 is not one of"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 3000}]}, "the context 1024: shorten"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice: demands a tool"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format: "),
    (TEXT, {"prompt": ""}, "the prompt is empty"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "template refuses them"),
    (TEXT, {"prompt": [1 << 40]}, "is not one of 4096 token ids"),
    (TEXT, {"prompt": [-1]}, "-1 is not one of 4096 token ids"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt: send one request for each"),
    (MESSAGES, {"messages": USER}, "max_tokens: Field required"),
    (MESSAGES, {"messages": USER, "max_tokens": 4, "tool_choice": {"type": "any"}}, "tool_choice"),
    ("/v1/embeddings", {"input": "a"}, "start serve with --embeddings"),
]
SCHEMAS: list[tuple[Any, str]] = [
    ({"$ref": "https://example.com/s.json"}, "cannot be made a grammar"),
    ({"type": "nonsense"}, "cannot be made a grammar"),
    ({"type": "string", "maxLength": 10**9}, "maxLength is 1000000000: give at most 1000"),
    ({"type": "string", "pattern": "^a{1,99999}$"}, "a pattern repeats more than 1000 times"),
]
deep: Any = {"type": "string"}
for _ in range(900):
    deep = {"type": "array", "items": deep}
nested = {"type": "function", "function": {"name": "f", "parameters": deep}}
asked = {"messages": USER, "tools": [nested], "tool_choice": "required"}
BAD.append((CHAT, asked, "nested too deeply"))
for schema, why in SCHEMAS:
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    BAD.append((CHAT, {"messages": USER, "response_format": asked}, why))


@pytest.mark.parametrize(("path", "body", "words"), BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_get_one_clear_line(
    server: Server, path: str, body: dict[str, Any], words: str, stream: bool
) -> None:
    if stream and path == "/v1/embeddings":
        return
    data = json.dumps({**body, "stream": stream})
    done = server.client.post(path, content=data, headers={"content-type": "application/json"})
    assert done.status_code == 400, done.text
    found = done.json()
    if path == MESSAGES:
        assert found["type"] == "error"
    message = found["error"]["message"]
    assert words in message and "\n" not in message and "Traceback" not in message
    assert found["error"]["type"] == "invalid_request_error"


def test_what_is_no_request_at_all(server: Server) -> None:
    client, kind = server.client, {"content-type": "application/json"}
    assert client.post(CHAT, content=b'{"a":', headers=kind).status_code == 400
    assert client.post(CHAT, content=b"\xff\xfe", headers=kind).status_code == 400
    assert client.post(CHAT, content=b"[" * 50_000, headers=kind).status_code == 400
    assert client.post(CHAT, content=b"{}").status_code == 415
    assert client.post(CHAT, content=b" " * (9 << 20), headers=kind).status_code == 413
    chunks = (b" " * (1 << 20) for _ in range(9))
    assert client.post(CHAT, content=chunks, headers=kind).status_code == 413
    assert client.get("/nothing").json()["error"]["message"] == "/nothing: there is no such path"
    assert client.get(CHAT).status_code == 405
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
    large = [{"role": "user", "content": "word " * (1 << 20)}]  # within the limit: 5 MiB
    assert "tokens and the context" in server.post(CHAT, messages=large).text
    assert server.ask(SUM)["choices"][0]["message"]["content"] == "42"


def test_pages_beside_the_apis(server: Server) -> None:
    page = server.client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "<title>routeahead</title>" in page.text
    assert "http://" not in page.text and "https://" not in page.text
    assert server.client.get("/health").json()["status"] == "ok"
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "routeahead tiny qwen3moe"
    before = server.counters()["decode"]["tokens"]
    used = server.ask(NUMBER)["usage"]["completion_tokens"]
    metrics = server.client.get("/metrics").text
    # The last token is sampled and ends the text: each of those before it was evaluated.
    assert f'routeahead_tokens_total{{phase="decode"}} {before + used:.1f}' in metrics
    idle = re.search(r'routeahead_read_bytes_total\{phase="idle"\} (\S+)', metrics)
    assert idle and 0 < float(idle[1]) <= server.counters()["idle_bytes"]
    assert 'routeahead_requests_total{path="/v1/chat/completions",status="200"}' in metrics


def test_the_openai_client(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert client.models.list().data[0].id == "routeahead tiny qwen3moe"
    messages = [{"role": "user", "content": NUMBER}]
    done = client.chat.completions.create(model="any", messages=messages, temperature=0)
    assert done.choices[0].message.content == ANSWER
    stream = client.chat.completions.create(
        model="any", messages=messages, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER
    called = client.chat.completions.create(
        model="any", messages=messages, tools=[FUNCTION], tool_choice="required", max_tokens=300
    )
    assert called.choices[0].message.tool_calls[0].function.name == "add"
    text = client.completions.create(model="any", prompt=f"{NUMBER}\nAnswer:", temperature=0)
    assert text.choices[0].text.strip().startswith("sept cent")
    with pytest.raises(openai.BadRequestError, match="messages: List should have at least 1"):
        client.chat.completions.create(model="any", messages=[])


def test_the_anthropic_client(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    ask = {"model": "any", "max_tokens": 300, "messages": [{"role": "user", "content": NUMBER}]}
    assert client.messages.create(**ask, extra_body=GREEDY).content[0].text == ANSWER
    with client.messages.stream(**ask, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().stop_reason == "end_turn"
    called = client.messages.create(
        **ask, extra_body=GREEDY, tools=[TOOL], tool_choice={"type": "any"}
    )
    assert called.content[0].name == "add" and called.stop_reason == "tool_use"
    counted = client.messages.count_tokens(model="any", messages=ask["messages"])
    assert counted.input_tokens > 5
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**ask, "max_tokens": 0})


def test_embeddings(tmp_path: Path) -> None:
    with Server(tmp_path, "--cache-mb", 2, "--embeddings") as server:
        texts = [NUMBER, SUM, NUMBER]
        done = server.post("/v1/embeddings", input=texts, model="any").json()
        first, second, third = (one["embedding"] for one in done["data"])
        assert first == third != second and len(first) == 192
        assert sum(x * x for x in first) == pytest.approx(1, abs=1e-4)
        refused = server.post(CHAT, messages=USER)
        assert refused.status_code == 400 and "without --embeddings" in refused.text
