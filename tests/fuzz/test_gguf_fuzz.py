"""Damaged files: each loads or is refused with one clear line, in bounded time and memory.

Every case runs in a process of its own, so that an abort is a failed case. `make test-slow` tries
new damage for ten minutes; what it finds is written to the corpus and stays there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support import models
from support.gguf_damage import ARCHITECTURES, damaged, small
from support.gguf_parts import take_apart
from support.load_server import LoadServer

DATA = Path(__file__).parent.parent / "data" / "gguf"
MIB = 1 << 20
MOST = 512 * MIB
"""Bytes that a load may have resident, of which Python and its libraries take 100 MiB and the
positions of the longest context that is believed 128."""

# Structures are tried in 50 s here and in ten minutes by `make test-slow`.
CASES, SLOW_CASES = 200, 2500
QUICK = settings(
    max_examples=CASES, derandomize=True, database=None, deadline=None,
    suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
)  # fmt: skip
SLOW = settings(QUICK, max_examples=SLOW_CASES, derandomize=False, print_blob=True)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / f"{request.param}.gguf"
    return models.write(path, small(request.param))


@pytest.fixture(scope="module")
def server(sound: Path) -> Iterator[LoadServer]:
    server = LoadServer(sound)
    yield server
    server.close()


def check(outcome: dict[str, Any]) -> None:
    status, message = outcome["status"], outcome["message"]
    assert status in ("loaded", "refused"), message
    assert message.isprintable()
    assert bool(message) == (status == "refused")
    assert outcome["rss"] < MOST


def _try_damage(profile: settings, sound: Path, server: LoadServer) -> None:
    path = sound.with_suffix(".damaged")

    @profile
    @given(damaged(take_apart(sound)))
    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        check(server.load(path))

    attempt()


def test_what_is_sound_loads(sound: Path, server: LoadServer) -> None:
    assert server.load(sound)["status"] == "loaded"


@pytest.mark.timeout(600)  # 10 s on a core of its own
def test_damage(sound: Path, server: LoadServer) -> None:
    _try_damage(QUICK, sound, server)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_new_damage(sound: Path, server: LoadServer) -> None:
    _try_damage(SLOW, sound, server)


def corpus() -> list[tuple[str, str]]:
    lines = (DATA / "corpus.txt").read_text(encoding="utf-8").split("\n")
    return [tuple(line.split(": ", 1)) for line in lines if line and line[0] != "#"]  # type: ignore[misc]


def edit(base: bytes, edits: str) -> bytes:
    """`OFFSET=HEX` writes over bytes, `OFFSET+HEX` inserts, `OFFSET-COUNT` removes and `OFFSET|`
    cuts; the last one first, so that offsets are the base's."""
    data = bytearray(base)
    for part in reversed(edits.split()):
        digits = len(part) - len(part.lstrip("0123456789"))
        at, sign, rest = int(part[:digits]), part[digits], part[digits + 1 :]
        if sign == "|":
            del data[at:]
        elif sign == "-":
            del data[at : at + int(rest)]
        else:
            new = bytes.fromhex(rest)
            data[at : at + (len(new) if sign == "=" else 0)] = new
    return bytes(data)


@pytest.fixture(scope="module")
def base() -> bytes:
    """The header of a small qwen3moe, whose weights are zeros."""
    return (DATA / "qwen3moe.header").read_bytes()


@pytest.fixture(scope="module")
def corpus_server(base: bytes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadServer]:
    path = tmp_path_factory.mktemp("corpus") / "sound.gguf"
    path.write_bytes(base)
    os.truncate(path, len(base) + MIB)
    server = LoadServer(path)
    yield server
    server.close()


@pytest.mark.parametrize(("name", "edits"), corpus())
def test_corpus(
    base: bytes, corpus_server: LoadServer, tmp_path: Path, name: str, edits: str
) -> None:
    path = tmp_path / "damaged.gguf"
    data = edit(base, edits)
    path.write_bytes(data)
    if not edits.endswith("|"):
        os.truncate(path, len(data) + MIB)
    check(corpus_server.load(path))
