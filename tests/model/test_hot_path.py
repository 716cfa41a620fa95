"""What a decoded token costs the evaluation thread, in calls and locks, which no machine changes.

After a layer's products have filled the CPU's caches, each function that a stop comes to is fetched
from memory again, so it is the number of calls that a routing's management costs.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from support.library import evaluate, token_batches, with_budget

import routeahead
from routeahead import Llama
from routeahead.experts.source import ExpertSource

Load = Callable[..., Llama]
PACKAGE = str(Path(routeahead.__file__).parent)
OURS = "functions of the package"


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls on this thread: of the package's functions, and of C functions by name."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[OURS] += frame.f_code.co_filename.startswith(PACKAGE)
        elif event == "c_call":
            calls[getattr(argument, "__qualname__", "")] += 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def land_in_time(source: ExpertSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read early has arrived before anything else happens."""
    read_early = source.read_early

    def read_and_wait(layer: int, experts: Sequence[int]) -> None:
        read_early(layer, experts)
        for ticket in source._early[layer].tickets.values() if layer in source._early else ():
            while ticket.remaining:
                time.sleep(0)

    monkeypatch.setattr(source, "read_early", read_and_wait)


@pytest.mark.parametrize("policy", ["lru", "decay"])
@pytest.mark.parametrize(
    ("depth", "packed", "most", "locks"),
    [(0, False, 64, 3), (2, False, 110, 1), (0, True, 58, 1)],
)
def test_calls_and_locks_of_a_routing(
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    depth: int,
    packed: bool,
    most: int,
    locks: int,
) -> None:
    """Half of the experts cached; without overlap, where each routing is one stop."""
    settings = {"cache_policy": policy, "route_ahead": depth, "packed": packed}
    llm = with_budget(load, "qwen3moe", 0.5, overlap=False, **settings)
    assert llm.source
    land_in_time(llm.source, monkeypatch)
    cache, layers = llm.source.cache, len(llm.layout.moe_layers)
    evaluate(llm, token_batches(1))
    missed, batches = cache.misses, token_batches(2, prompt=1, decode=40)
    with counted() as calls:
        evaluate(llm, batches)
    routings = len(batches) * layers
    assert cache.misses - missed > routings
    assert calls[OURS] <= most * routings
    # A lock for each of the three projections that a layer waits for (one, if a read brings them
    # all), and what has landed when its
    # layer asks needs none: of a token, the first two layers alone wait.
    assert calls["allocate_lock"] <= locks * routings
