"""`serve --ray`: two replicas on a local cluster, as clients see them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

CHAT = "/v1/chat/completions"
ENDLESS = {"max_tokens": 900, "logit_bias": {"0": -100, "2": -100}}  # tokens that end a text


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    prompts = tmp_path_factory.mktemp("prompts")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "routeahead", "serve", "--ray", "local", "--replicas", "2"]
    command += ["--port", str(port), "-t", "1", "--cache-mb", "2", "--prompt-cache", str(prompts)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("serving http"):
                break
        else:
            pytest.fail("".join(lines))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as made:
            yield made
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0 and not rest.strip(), rest
        assert list(prompts.glob("*.kv"))  # what was said is kept


def ask(client: httpx.Client, *texts: str, **more: Any) -> httpx.Response:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return client.post(CHAT, json={"messages": messages, "temperature": 0, **more})


def replica(response: httpx.Response) -> str:
    return response.headers["x-routeahead-replica"]


def running(client: httpx.Client) -> int:
    return sum(client.get("/health", params={"replica": n}).json()["running"] for n in (0, 1))


def test_a_conversation_stays_with_its_replica(client: httpx.Client) -> None:
    seen = set()
    for a in range(10, 20):
        question = f"What is {a} + 12?"
        first = ask(client, question)
        answer = first.json()["choices"][0]["message"]["content"]
        assert answer == str(a + 12)
        second = ask(client, question, answer, "What is 50 - 6?")
        assert replica(second) == replica(first)
        usage = second.json()["usage"]
        held = usage["prompt_tokens_details"]["cached_tokens"]
        assert held >= first.json()["usage"]["prompt_tokens"] - 1  # only the new ones were read
        seen.add(replica(first))
    assert seen == {"0", "1"}


def test_streams_and_errors_come_through(client: httpx.Client) -> None:
    lines = ask(client, "What is 25 + 17?", stream=True).text.splitlines()
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in parts) == "42"
    assert lines[-2] == "data: [DONE]"
    assert client.post(CHAT, json={}).status_code == 400
    assert client.post(CHAT, content=b"a=b").status_code == 415
    assert client.get("/nothing").status_code == 404
    assert client.get("/health", headers={"Host": "elsewhere"}).status_code == 403
    assert "<!doctype html>" in client.get("/").text
    big = client.post(CHAT, content=b" " * (9 << 20), headers={"content-type": "application/json"})
    assert big.status_code == 413


def test_an_answer_ends_when_its_client_goes(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Tell"}], "stream": True, **ENDLESS}
    with client.stream("POST", CHAT, json=body) as response:
        assert next(response.iter_lines())
        assert running(client) == 1
    until = time.monotonic() + 20
    while running(client):
        assert time.monotonic() < until
        time.sleep(0.1)
