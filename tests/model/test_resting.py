"""A model that nobody uses gives memory back; a batch and who shrinks the cache never meet."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from support import raw
from support.eater import EATER, mib_to_eat
from support.library import PROMPTS, Library, evaluate
from support.processes import memory_limit

from routeahead import Llama
from routeahead.experts.layout import MIB
from routeahead.experts.reader import Reader

if TYPE_CHECKING:
    from support.machine import Machine

pytest_plugins = ["support.machine"]

Load = Callable[..., Llama]
NAME = "qwen3moe"


def scarce(machine: Machine, llm: Llama) -> None:
    """Leaves room for 10 MiB of cache."""
    own = llm.streamed.budget
    machine.total = own._headroom + own._beside + 10 * MIB


@pytest.mark.parametrize("cache_mb", [60, 72], ids=["a part", "all"])
def test_a_resting_model_shrinks(large: Path, machine: Machine, cache_mb: int) -> None:
    """At the second look after its last batch, and its memory is the kernel's again."""
    llm = machine.new(large, cache_mb=cache_mb)
    expected = evaluate(llm, PROMPTS[0])
    cache, full, rss = llm.source.cache, llm.source.cache.used, psutil.Process().memory_info().rss
    scarce(machine, llm)
    machine.look(llm)
    assert cache.used == full  # the next batch may come at once, and does it itself
    looking = threading.Thread(target=machine.look, args=(llm,))
    looking.start()
    looking.join()
    assert cache.used <= 10 * MIB and llm.streamed.budget.resizes == 1
    # What is held beside the cache is given back with it.
    assert rss - psutil.Process().memory_info().rss > 0.8 * (full - cache.used) > 30 * MIB
    machine.look(llm)
    assert llm.streamed.budget.resizes == 1  # once is enough
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), expected)
    assert llm.streamed.budget.resizes == 1


def test_a_batch_waits_for_who_shrinks_the_cache(large: Path, machine: Machine) -> None:
    """It begins when the cache is whole again, and finds what is left."""
    llm = machine.new(large, cache_mb=60)
    expected = evaluate(llm, PROMPTS[0])
    order: list[str] = []
    begun, resize, begin = threading.Event(), llm.source.resize, llm.source.begin

    def slow(size: int) -> None:
        order.append("shrinks")
        begun.set()
        time.sleep(0.1)
        resize(size)
        time.sleep(0.1)
        order.append("has shrunk")

    def batch() -> None:
        order.append("batch")
        begin()

    llm.streamed.budget._resize, llm.source.begin = slow, batch  # type: ignore[method-assign]
    scarce(machine, llm)
    machine.look(llm)
    looking = threading.Thread(target=machine.look, args=(llm,))
    looking.start()
    begun.wait()
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), expected)
    looking.join()
    assert order[:3] == ["shrinks", "has shrunk", "batch"]


class Looking:
    """Looks at memory inside of reads: a batch is being evaluated."""

    llm: Llama | None = None

    def __init__(self, inner: Reader) -> None:
        self._inner, self.looks, self.resizes = inner, 0, 0

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        if self.llm:
            own = self.llm.streamed.budget
            for _ in range(2):
                own.look()
            self.looks += 1
            self.resizes = own.resizes
        return self._inner.read(shard, offset, view, need)

    def close(self) -> None:
        self._inner.close()


def test_nobody_shrinks_the_cache_of_a_batch(
    load: Load, library: Library, machine: Machine
) -> None:
    """Prompts, too, and what is poisoned is not touched."""
    made: list[Looking] = []

    def wrap(inner: Reader) -> Looking:
        made.append(Looking(inner))
        return made[0]

    llm = load(NAME, cache_mb=2, wrap_reader=wrap, poison=True)
    evaluate(llm, PROMPTS[1])
    machine.total = 0
    made[0].llm = llm
    llm.reset()
    llm.phase = "prefill"
    llm.eval(PROMPTS[0][0])
    assert made[0].looks > 5 and made[0].resizes == llm.streamed.budget.resizes == 0
    machine.look(llm)
    machine.look(llm)
    assert llm.streamed.budget.resizes == 1
    made[0].llm = None
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), library.resident(NAME)[0])


def test_a_batch_of_llama_decode_keeps_the_cache(
    load: Load, library: Library, machine: Machine
) -> None:
    """Nobody is told of its end: the next batch that is announced ends it, too."""
    llm = load(NAME, cache_mb=2)
    evaluate(llm, PROMPTS[0])
    raw.clear(llm)
    assert raw.decode(llm, PROMPTS[0][0], 0) == 0
    machine.total = 0
    for _ in range(3):
        machine.look(llm)
    assert llm.streamed.budget.resizes == 0
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), library.resident(NAME)[0])
    assert llm.streamed.budget.resizes == 1


def test_a_failed_batch_gives_the_cache_back(load: Load, machine: Machine) -> None:
    llm = load(NAME, cache_mb=2)
    evaluate(llm, PROMPTS[1])
    plain, llm._plain_decode = llm._plain_decode, lambda _: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        llm.eval([5])
    llm._plain_decode = plain  # type: ignore[method-assign]
    machine.total = 0
    machine.look(llm)
    machine.look(llm)
    assert llm.streamed.budget.resizes == 1


RESTING = """
import hashlib, json, sys
import psutil
sys.path.insert(0, sys.argv[2])
from support.library import PROMPTS, evaluate
from routeahead import Llama
llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, cache_mb=60)
cache, process = llm.source.cache, psutil.Process()
digest = lambda: hashlib.sha256(evaluate(llm, PROMPTS[0]).tobytes()).hexdigest()
state = lambda: [process.memory_info().rss >> 20, cache.used >> 20, llm.streamed.budget.resizes]
first = digest()
print(json.dumps(state()), flush=True)
sys.stdin.readline()
print(json.dumps([state(), digest() == first]), flush=True)
"""


@pytest.mark.xdist_group("machine")
def test_another_process_eats_the_memory_of_a_resting_model(large: Path) -> None:
    """Nobody calls the model, and nobody is killed for what it holds."""
    tests = str(Path(__file__).parents[1])
    with memory_limit(640) as group:
        command = group.wrap([sys.executable, "-c", RESTING, str(large), tests])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as user:  # type: ignore[call-overload]
            before = json.loads(user.stdout.readline())
            eat = str(mib_to_eat(group, 640) + 20)
            eaten = subprocess.run(
                group.wrap([sys.executable, "-c", EATER, eat]), check=False, timeout=100
            )
            user.stdin.write("\n")
            user.stdin.flush()
            rested, same = json.loads(user.stdout.readline())
        assert group.kills() == 0 and eaten.returncode == 0 and user.returncode == 0
    assert before[1] > 50 and before[2] == 0
    assert rested[1] < before[1] / 2 and rested[2] >= 1
    assert before[0] - rested[0] > 25  # MiB, of the process
    assert same
