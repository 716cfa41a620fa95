"""Memory that others need: caches that give way, share, and grow again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from support.eater import EATER, mib_to_eat
from support.library import PROMPTS, Library, evaluate
from support.processes import limited, memory_limit

from routeahead import Llama, SettingsError
from routeahead.engine import budget
from routeahead.experts.layout import MIB

if TYPE_CHECKING:
    from support.machine import Machine

pytest_plugins = ["support.machine"]

Load = Callable[..., Llama]
NAME = "qwen3moe"


def test_a_cache_gives_way_and_grows_again(large: Path, machine: Machine) -> None:
    """Its memory is the kernel's again, and every token is the same."""
    llm = machine.new(large)
    expected = evaluate(llm, PROMPTS[0])
    cache, experts = llm.source.cache, llm.layout.expert_bytes
    assert cache.budget == experts
    full, rss = cache.used, psutil.Process().memory_info().rss
    machine.total = budget.HEADROOM + llm.layout.layer_bytes() + llm.source.window + 10 * MIB
    machine.look(llm)
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), expected)
    assert cache.budget <= 10 * MIB and cache.used <= 10 * MIB + llm.layout.layer_bytes()
    # Free pages for one layer and for what is read ahead stay.
    given_back = full - cache.used - llm.layout.layer_bytes() - llm.source.window
    assert rss - psutil.Process().memory_info().rss > 0.8 * given_back > 10 * MIB
    machine.total = 1 << 30
    machine.look(llm)
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), expected)
    assert cache.budget == experts
    assert llm.streamed.budget.resizes == 2 and llm.streamed.budget.least <= 30 * MIB
    assert cache.hits + cache.misses == llm.counters.prefill.hits + llm.counters.prefill.misses + (
        llm.counters.decode.hits + llm.counters.decode.misses
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"route_ahead": 2}, {"prefetch": 2}, {"drop_cold_experts": 0.3}],
    ids=["plain", "route-ahead", "prefetch", "drop"],
)
@pytest.mark.filterwarnings("ignore:drop_cold_experts with")
def test_resized_before_every_batch(
    load: Load, library: Library, machine: Machine, settings: dict[str, object]
) -> None:
    """With a poisoned arena: what was given back and not read again would be a crash."""
    llm = load(NAME, cache_mb=4, poison=True, **settings)
    sizes = iter([4, 1, 2, 4, 3, 1] * 20)
    take = llm.streamed.budget.take
    llm.streamed.budget.take = lambda: take() or next(sizes) * MIB // 2  # type: ignore[method-assign]
    logits = evaluate(llm, PROMPTS[0])
    assert llm.source.cache.evictions > 20
    if settings in ({}, {"prefetch": 2}):
        np.testing.assert_array_equal(logits, library.resident(NAME)[0])


def test_a_floor_holds(large: Path, machine: Machine) -> None:
    llm = machine.new(large, cache_floor_mb=40)
    machine.total = 0
    machine.look(llm)
    evaluate(llm, PROMPTS[1])
    assert llm.source.cache.budget == 40 * MIB
    with pytest.raises(SettingsError, match="cache_floor_mb=50 is more than cache_mb=40"):
        machine.new(large, cache_mb=40, cache_floor_mb=50)


def test_two_models_share_what_is_free(large: Path, machine: Machine) -> None:
    """Each would take all of it: the first gives its half back at its next batch."""
    first = machine.new(large)
    beside = first.layout.layer_bytes() + first.source.window
    machine.total = budget.HEADROOM + 2 * beside + 82 * MIB
    machine.look(first)
    evaluate(first, PROMPTS[1])
    second = machine.new(large)
    machine.look(first)
    for llm in (first, second, first):
        evaluate(llm, PROMPTS[0])
        machine.look(first)
        machine.look(second)
    used = [llm.source.cache.used for llm in (first, second)]
    assert sum(used) <= 80 * MIB + 2 * first.layout.layer_bytes()
    assert min(llm.streamed.budget.now for llm in (first, second)) > 30 * MIB
    first.close()
    machine.look(second)
    evaluate(second, PROMPTS[1])
    assert second.source.cache.budget > 60 * MIB


def test_a_size_beyond_what_is_free_is_said(large: Path, machine: Machine) -> None:
    machine.total = 120 * MIB
    with pytest.warns(UserWarning, match=r"cache_mb=500, but \d+ MiB are free") as warned:
        llm = machine.new(large, cache_mb=500)
    assert len(warned) == 1 and llm.source.cache.budget < llm.layout.expert_bytes
    machine.total = 1 << 30
    machine.look(llm)
    evaluate(llm, PROMPTS[1])
    assert llm.source.cache.budget == llm.layout.expert_bytes


def test_a_size_beyond_all_experts_is_all_experts(large: Path, machine: Machine) -> None:
    """What it gives way by is a part of what it can hold, and not of what was asked for."""
    machine.total = 8 << 30
    llm = machine.new(large, cache_mb=1 << 20)
    experts = llm.layout.expert_bytes
    evaluate(llm, PROMPTS[0])
    assert llm.source.cache.budget == experts
    machine.total = 7 << 30  # others took some, and there is plenty left
    machine.look(llm)
    evaluate(llm, PROMPTS[0])
    assert llm.source.cache.budget == experts
    assert llm.streamed.budget.resizes == 0


TMPFS = """
import ctypes, mmap, os, sys
from routeahead.machine.memory import available_bytes
before = available_bytes()
fd = os.memfd_create("taken")  # shared memory is counted as a tmpfs is
with mmap.mmap(fd, os.ftruncate(fd, 100 << 20) or 100 << 20) as taken:
    taken.write(b"x" * (100 << 20))
    print(before - available_bytes() >> 20)
"""


def test_shared_memory_is_not_free() -> None:
    done = limited(400, [sys.executable, "-c", TMPFS])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 95


USER = """
import hashlib, json, sys, threading, time
sys.path.insert(0, sys.argv[2])
from support.library import PROMPTS, evaluate
from routeahead import Llama
llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, cache_mb=72)
own, digests, left = llm.streamed.budget, set(), threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), left.set()), daemon=True).start()
until, ready = time.monotonic() + 60, False
while time.monotonic() < until and not (left.is_set() and own.now == 72 << 20):
    digests.add(hashlib.sha256(evaluate(llm, PROMPTS[0]).tobytes()).hexdigest())
    if not ready:
        print("ready", flush=True)
        ready = True
print(json.dumps([len(digests), own.least >> 20, own.now >> 20, own.resizes]))
"""


@pytest.mark.xdist_group("machine")
def test_another_process_eats_the_memory(large: Path) -> None:
    """Under a limit that has no room for both: nobody is killed, and every token is the same."""
    tests = str(Path(__file__).parents[1])
    with memory_limit(640) as group:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = group.wrap([sys.executable, "-c", USER, str(large), tests])
        with subprocess.Popen(command, **pipes) as user:  # type: ignore[call-overload]
            assert user.stdout.readline() == "ready\n"
            eat = mib_to_eat(group, 640) + 20  # by a third of what the cache holds
            eaten = subprocess.run(
                group.wrap([sys.executable, "-c", EATER, str(eat)]), check=False, timeout=100
            )
            # Until it is told, it does not end: the cache may lose little and regain it at once
            # while the other process has not taken all that it wants.
            user.stdin.write("\n")
            user.stdin.flush()
            digests, least, last, resizes = json.loads(user.stdout.readline())
        assert group.kills() == 0 and eaten.returncode == 0 and user.returncode == 0
        assert digests == 1
        # 20 MiB beyond what there is, and what stays free, are more than the cache can give: it
        # goes down to what one token routes to.
        assert least < 20 and last == 72 and resizes >= 2
