"""A server's life: keys, a full queue, clients that go, signals, conversations that outlive it."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
import httpx
from support.servers import CHAT, MESSAGES, Server

from routeahead import Llama
from routeahead.models import DEFAULT_MODEL

pytestmark = pytest.mark.xdist_group("server")

# Tokens 0 and 2 end a text: without them an answer goes on to its limit. With 8 MiB/s and no cache
# a token takes a quarter of a second, so an answer of 900 outlasts every test.
ENDLESS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell"}],
    "max_tokens": 900,
    "logit_bias": {"0": -100, "2": -100},
    "stream": True,
}
SLOW = ("--cache-mb", 0, "--throttle", 8)
FRANCE = "What is the capital of France?"
QUESTION = {"messages": [{"role": "user", "content": FRANCE}], "temperature": 0}


def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come about")


def load(server: Server) -> tuple[int, int]:
    found = server.client.get("/health").json()
    return found["running"], found["waiting"]


def test_only_a_key_opens(tmp_path: Path) -> None:
    keys = {"ROUTEAHEAD_API_KEY": "one two"}  # as many as there are words
    with Server(tmp_path, "--cache-mb", 2, environment=keys) as server:
        client = server.client
        for key in (b"", b"Bearer on", b"Bearer one two", "Bearer é".encode("latin-1")):
            headers = {b"authorization": key}
            refused = client.post(CHAT, json=QUESTION, headers=headers)
            assert refused.status_code == 401 and "API key" in refused.json()["error"]["message"]
            for path in ("/api/stream", "/metrics", "/v1/models", "/nothing"):
                assert client.get(path, headers=headers).status_code == 401
        other = client.post(MESSAGES, json={}).json()
        assert other["type"] == "error" and other["error"]["type"] == "authentication_error"
        assert client.get("/").status_code == client.get("/health").status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "two"}).status_code == 200
        done = client.post(CHAT, json=QUESTION, headers={"authorization": "Bearer one"})
        assert done.json()["choices"][0]["message"]["content"] == "Paris"
        assert server.stop(signal.SIGINT) == 0
        assert len(server.errors) == 1, server.errors


def test_a_full_queue_and_clients_that_go(tmp_path: Path) -> None:
    with Server(tmp_path, *SLOW, "--queue", 1) as server:
        with httpx.stream("POST", server.url + CHAT, json=ENDLESS, timeout=60) as running:
            assert '"role": "assistant"' in next(running.iter_lines())
            impatient = httpx.Client(timeout=1)
            with pytest.raises(httpx.ReadTimeout):  # it waits in the queue until its client goes
                impatient.post(server.url + CHAT, json=QUESTION)
            until(lambda: load(server) == (1, 0))
            waiting = threading.Thread(target=server.ask, args=(FRANCE,))
            waiting.start()
            until(lambda: load(server) == (1, 1))
            for path, kind in ((CHAT, "rate_limit_error"), (MESSAGES, "rate_limit_error")):
                refused = server.post(path, **QUESTION, max_tokens=4)
                assert refused.status_code == 429 and refused.json()["error"]["type"] == kind
                assert int(refused.headers["retry-after"]) >= 1
        waiting.join(60)  # it is answered, because the first client has gone
        assert load(server) == (0, 0)
        assert server.counters()["decode"]["tokens"] < 500  # of the 900
        # A client that does not stream and goes is noticed too.
        with pytest.raises(httpx.ReadTimeout):
            impatient.post(server.url + CHAT, json={**ENDLESS, "stream": False})
        assert server.ask(FRANCE)["choices"][0]["message"]["content"] == "Paris"
        assert server.counters()["decode"]["tokens"] < 500


def test_sigterm_cuts_an_answer_and_leaves_whole_files(tmp_path: Path) -> None:
    with Server(tmp_path, *SLOW) as server:
        with httpx.stream("POST", server.url + CHAT, json=ENDLESS, timeout=60) as running:
            lines = running.iter_lines()
            next(lines)
            waiting: list[httpx.Response] = []
            thread = threading.Thread(target=lambda: waiting.append(server.post(CHAT, **QUESTION)))
            thread.start()
            until(lambda: load(server) == (1, 1))
            server.process.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line)
        assert "was cut" in json.loads(last[6:])["error"]["message"]
        thread.join(60)
        assert waiting[0].status_code == 503 and "being stopped" in waiting[0].text
        assert server.process.wait(60) == 0
        assert len(server.errors) == 1, server.errors
    (path,) = tmp_path.iterdir()  # what was said until then
    assert path.stem.endswith(f"-{zlib.crc32(path.read_bytes()):08x}") and path.suffix == ".kv"


def test_a_turn_after_a_restart_evaluates_its_new_tokens_only(tmp_path: Path) -> None:
    turns: list[dict[str, str]] = [
        {"role": "system", "content": "You know capitals, numbers and sums. " * 20},
        {"role": "user", "content": FRANCE},
    ]
    with Server(tmp_path, "--cache-mb", 2) as server:
        first = server.post(CHAT, messages=turns, temperature=0).json()
        evaluated = server.counters()["prefill"]["tokens"]
        assert evaluated == first["usage"]["prompt_tokens"] > 150
        assert server.stop() == 0
    turns += [first["choices"][0]["message"], {"role": "user", "content": "What is 12 + 30?"}]
    with Server(tmp_path, "--cache-mb", 2) as server:
        second = server.post(CHAT, messages=turns, temperature=0).json()
        counted = server.counters()["prefill"]["tokens"]
        # New are the end of the first answer, the question, and the start of the next answer.
        usage = second["usage"]
        assert counted == usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert counted <= usage["prompt_tokens"] - evaluated < 40
        again = server.post(CHAT, messages=turns, temperature=0).json()
        assert server.counters()["prefill"]["tokens"] <= counted + 1
        assert again["choices"] == second["choices"]
    llm = Llama(DEFAULT_MODEL, n_ctx=1024, n_threads=1, resident=True)
    try:
        fresh: Any = llm.create_chat_completion(turns, temperature=0)  # type: ignore[arg-type]
        assert fresh["choices"][0]["message"] == second["choices"][0]["message"]
    finally:
        llm.close()


def test_connections_beyond_the_open_files_wait(tmp_path: Path) -> None:
    with Server(tmp_path, "--cache-mb", 2) as server:
        there = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        limits = (there + 5, there + 5)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
        address = ("127.0.0.1", httpx.URL(server.url).port)
        waiting = [socket.create_connection(address) for _ in range(20)]
        until(lambda: any("too many open files" in line for line in server.errors))
        for one in waiting:
            one.close()
        assert server.ask(FRANCE)["choices"][0]["message"]["content"] == "Paris"
        assert server.stop(signal.SIGTERM) == 0
        assert len(server.errors) == 2, "\n".join(server.errors)
