"""A server that is killed while it answers: the conversations that it has kept are whole."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
import zlib
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
import httpx
from support.servers import CHAT, Server

pytestmark = pytest.mark.xdist_group("server")

QUESTIONS = ["What is the capital of France?", "What is 12 + 30?", "Say seven in French."]
SYSTEM = {"role": "system", "content": "You know capitals, numbers and sums. " * 20}


def ask(url: str, question: str) -> str:
    messages = [SYSTEM, {"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    done = httpx.post(url + CHAT, json=body, timeout=60)
    return str(done.json()["choices"][0]["message"]["content"])


def strike(folder: Path, rng: random.Random, answers: dict[str, str]) -> str:
    """Two clients ask, and a signal comes; then every kept conversation is what its name says."""
    number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    with Server(folder, "--cache-mb", 2) as server:
        ended, wrong = threading.Event(), list[str]()

        def client(seed: float) -> None:
            nonlocal wrong
            own = random.Random(seed)
            while not ended.is_set():
                question = own.choice(QUESTIONS)
                with contextlib.suppress(httpx.HTTPError, KeyError):  # it has been killed
                    found = ask(server.url, question)
                    wrong += [found] if found != answers[question] else []

        clients = [threading.Thread(target=client, args=(rng.random(),)) for _ in range(2)]
        for one in clients:
            one.start()
        time.sleep(rng.uniform(0, 1.5))
        status = server.stop(number)
        ended.set()
        for one in clients:
            one.join()
        assert not wrong
        assert status == (-number if number == signal.SIGKILL else 0), server.errors
        assert not any("Traceback" in line for line in server.errors), server.errors
    for path in folder.glob("*.kv"):
        assert path.stem.endswith(f"-{zlib.crc32(path.read_bytes()):08x}")
    assert number == signal.SIGKILL or not list(folder.glob("*.tmp"))
    return number.name


def answers(folder: Path) -> dict[str, str]:
    with Server(folder, "--cache-mb", 2) as server:
        return {question: ask(server.url, question) for question in QUESTIONS}


@pytest.mark.timeout(300)
def test_killed_while_it_answers(tmp_path: Path) -> None:
    rng, right = random.Random(4), answers(tmp_path / "right")
    folder = tmp_path / "conversations"
    for _ in range(2):
        strike(folder, rng, right)
    with Server(folder, "--cache-mb", 2) as server:
        assert {question: ask(server.url, question) for question in QUESTIONS} == right


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_killed_often_while_it_answers(tmp_path: Path) -> None:
    rng, right = random.Random(5), answers(tmp_path / "right")
    folder, counts = tmp_path / "conversations", dict[str, int]()
    for _ in range(30):
        name = strike(folder, rng, right)
        counts[name] = counts.get(name, 0) + 1
    with Server(folder, "--cache-mb", 2) as server:
        assert {question: ask(server.url, question) for question in QUESTIONS} == right
    print("serve", counts, "conversations", len(list(folder.glob("*.kv"))))
