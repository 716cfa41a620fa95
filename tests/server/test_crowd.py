"""Many clients at once: nobody gets another's answer, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
from support.crowd import Crowd, press, questions, rss_mib, serial
from support.servers import Server

pytestmark = pytest.mark.xdist_group("server")


def _idle(server: Server) -> bool:
    health = server.client.get("/health").json()
    return health == {"status": "ok", "running": 0, "waiting": 0}


def test_eight_clients(tmp_path: Path) -> None:
    with Server(tmp_path, "--cache-mb", 4, "--queue", 6) as server:
        crowd = Crowd(serial(server, questions(12)))
        press(server, crowd, clients=8, seconds=3)
        assert not crowd.wrong, crowd.wrong[:5]
        assert crowd.counts["right"] > 10 and crowd.counts["cancelled"] > 0
        # Everything has ended: the last cancelled job too, as soon as it is noticed.
        for _ in range(100):
            if _idle(server):
                break
        assert _idle(server)
        assert server.process.poll() is None and len(server.errors) == 1


@pytest.mark.slow
def test_fifty_clients_for_two_minutes(tmp_path: Path) -> None:
    """Prints what it counted: `pytest -m slow -s tests/server/test_crowd.py`."""
    with Server(tmp_path, "--cache-mb", 4, "--queue", 64) as server:
        crowd = Crowd(serial(server, questions(40)))
        press(server, crowd, clients=50, seconds=30)
        early = rss_mib(server)
        press(server, crowd, clients=50, seconds=90)
        late = rss_mib(server)
        print(json.dumps({**crowd.counts, "rss_mib": [round(early), round(late)]}))
        assert not crowd.wrong, crowd.wrong[:5]
        assert crowd.counts["right"] > 100
        assert late < early + 16
        assert server.process.poll() is None and len(server.errors) == 1
        assert server.stop() == 0
