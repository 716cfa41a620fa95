"""Which replica a request goes to: that of its conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
from routeahead.server.replicas import replica_of

CHAT = "/v1/chat/completions"
COUNT = 8


def replica(path: str = CHAT, **body: Any) -> int:
    return replica_of(path, "", json.dumps(body).encode(), COUNT)


def said(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_a_conversation_stays_and_conversations_spread() -> None:
    for first in ("a", "b", "c"):
        turns = [replica(messages=said(first, *more)) for more in ((), ("x", "y"), ("x", "y", "z"))]
        assert len(set(turns)) == 1
        system = {"role": "system", "content": "s"}
        longer = [replica(messages=[system, *said(first, *more)]) for more in ((), ("x", "y"))]
        assert len(set(longer)) == 1
    assert len({replica(messages=said(str(i))) for i in range(200)}) == COUNT
    assert len({replica("/v1/completions", prompt=str(i)) for i in range(200)}) == COUNT
    # Temperature, stream and the like do not matter; a prompt goes by its beginning.
    assert replica(messages=said("a"), stream=True) == replica(messages=said("a"))
    long = "x" * 1000
    assert replica("/v1/completions", prompt=long) == replica("/v1/completions", prompt=long + "y")


def test_what_is_no_conversation() -> None:
    assert replica_of("/health", "", b"", COUNT) == 0
    assert replica_of("/health", "replica=3", b"", COUNT) == 3
    assert replica_of("/health", "a=b&replica=11", b"", COUNT) == 3
    assert replica_of("/health", "replica=x", b"", COUNT) == 0
    for bad in (
        b"{",
        b"[]",
        b"1",
        b'{"messages": [1]}',
        b'{"messages": []}',
        b"\xff",
        b"[" * 10**5,
    ):
        assert 0 <= replica_of(CHAT, "", bad, COUNT) < COUNT
