"""Many clients of one server at once: answers, cancels, bad requests."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.servers import CHAT, MESSAGES, Server

BATTERY = Path(__file__).parents[2] / "benchmarks" / "data" / "battery.jsonl"
BAD: list[tuple[str, bytes]] = [
    (CHAT, b"{"),
    (CHAT, b'{"messages": []}'),
    (CHAT, json.dumps({"messages": [{"role": "user", "content": "a " * 3000}]}).encode()),
    (MESSAGES, b'{"max_tokens": 0, "messages": []}'),
]


@dataclass
class Crowd:
    """What became of the requests, by kind; `wrong` has what should not have been."""

    answers: dict[str, str]
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, wrong: str = "") -> None:
        with self.lock:
            self.counts[kind] += 1
            if wrong:
                self.wrong.append(wrong)


def questions(count: int) -> list[str]:
    """Prompts of the battery, spread over its kinds."""
    lines = BATTERY.read_text().splitlines()
    found = [json.loads(line)["prompt"] for line in lines[:: len(lines) // count]][:count]
    return [prompt.removeprefix("Question: ").partition("\nAnswer:")[0] for prompt in found]


def serial(server: Server, asked: list[str]) -> dict[str, str]:
    """Each question's answer if nobody else asks."""
    return {q: server.ask(q)["choices"][0]["message"]["content"] for q in asked}


def press(server: Server, crowd: Crowd, *, clients: int, seconds: float) -> None:
    """Has that many clients ask for so long; each answer is compared with the serial one."""
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_client, args=(server.url, crowd, seed, until))
        for seed in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rss_mib(server: Server) -> float:
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def _client(url: str, crowd: Crowd, seed: int, until: float) -> None:
    chance = random.Random(seed)
    with httpx.Client(base_url=url, timeout=120) as client:
        while time.monotonic() < until:
            kind = chance.choices(["whole", "stream", "other", "cancel", "bad"], [3, 3, 2, 2, 1])[0]
            question = chance.choice(list(crowd.answers))
            try:
                globals()[f"_{kind}"](client, crowd, question, chance)
            except httpx.HTTPError as error:
                crowd.note("failed", f"{kind}: {error!r}")


def _body(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": 60, **more}


def _compare(crowd: Crowd, question: str, answer: str) -> None:
    same = answer == crowd.answers[question]
    crowd.note("right" if same else "different", "" if same else f"{question!r}: {answer!r}")


def _refused(crowd: Crowd, response: httpx.Response) -> bool:
    """Whether the queue was full; waits as long as a client should, within reason."""
    if response.status_code != 429:
        if response.status_code != 200:
            crowd.note("failed", f"{response.status_code} {response.text}")
        return response.status_code != 200
    crowd.note("full", "" if response.headers.get("retry-after") else "no Retry-After")
    time.sleep(0.2)
    return True


def _whole(client: httpx.Client, crowd: Crowd, question: str, _: random.Random) -> None:
    done = client.post(CHAT, json=_body(question))
    if not _refused(crowd, done):
        _compare(crowd, question, done.json()["choices"][0]["message"]["content"])


def _stream(client: httpx.Client, crowd: Crowd, question: str, _: random.Random) -> None:
    done = client.post(CHAT, json=_body(question, stream=True))
    if not _refused(crowd, done):
        lines = [line[6:] for line in done.text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        _compare(crowd, question, "".join(delta.get("content", "") for delta in deltas))


def _other(client: httpx.Client, crowd: Crowd, question: str, _: random.Random) -> None:
    done = client.post(MESSAGES, json=_body(question))
    if not _refused(crowd, done):
        _compare(crowd, question, "".join(block["text"] for block in done.json()["content"]))


def _cancel(client: httpx.Client, crowd: Crowd, question: str, chance: random.Random) -> None:
    body = _body(question, stream=chance.random() < 0.5)
    try:
        with client.stream("POST", CHAT, json=body, timeout=chance.choice([0.05, 0.3, 2])) as it:
            next(it.iter_lines(), None)
    except httpx.TimeoutException:
        pass
    crowd.note("cancelled")


def _bad(client: httpx.Client, crowd: Crowd, _: str, chance: random.Random) -> None:
    path, data = chance.choice(BAD)
    done = client.post(path, content=data, headers={"content-type": "application/json"})
    right = done.status_code in (400, 429) and "\n" not in done.json()["error"]["message"]
    crowd.note("bad", "" if right else done.text)
