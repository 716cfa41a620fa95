"""Faults at random moments while a model runs: each token is right, or there is none.

A thread of its own strikes: it interrupts the evaluation (once, or again while that is cleaned up),
makes a read fail or come late, kills a lane, or changes the cache's size. Whatever is raised, the
same batch is evaluated again, and its logits are the resident model's.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.library import PROMPTS, Library
from support.readers import Unruly, disk_error

from routeahead import Llama, ReadError
from routeahead.experts.lanes import Lanes

Load = Callable[..., Llama]
NAME = "qwen3moe"


class Struck(Exception):
    """Raised in a lane from outside."""


class Striker(threading.Thread):
    """Strikes until it is stopped; interrupts the main thread only while it evaluates."""

    def __init__(self, seed: int, llm: Llama, reader: Unruly) -> None:
        super().__init__(name="striker", daemon=True)
        self._rng, self._llm, self._reader = random.Random(seed), llm, reader
        self._stop_now = threading.Event()
        self.strikes: dict[str, int] = {}

    def run(self) -> None:
        kinds = [self.once, self.twice, self.failing, self.late, self.lane, self.size]
        while not self._stop_now.wait(self._rng.uniform(0, 0.08)):
            kind = self._rng.choice(kinds)
            kind()
            self.strikes[kind.__name__] = self.strikes.get(kind.__name__, 0) + 1

    def stop(self) -> None:
        self._stop_now.set()
        self.join()

    def once(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def twice(self) -> None:
        self.once()
        time.sleep(self._rng.uniform(0, 0.001))
        self.once()

    def failing(self) -> None:
        self._reader.strike(self._rng.randrange(1, 30), self._rng.choice([disk_error, memory]))

    def late(self) -> None:
        self._reader.schedule(self._rng.randrange(100))

    def lane(self) -> None:
        lanes: Lanes = self._llm.source.lanes
        thread = self._rng.choice(lanes._threads)
        ident = ctypes.c_ulong(thread.ident if thread and thread.ident else 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Struck))

    def size(self) -> None:
        self._llm.streamed.budget._published = self._rng.choice([1, 2, 3, 8]) << 19


def memory() -> int:
    raise MemoryError


class Gate:
    """SIGINT raises KeyboardInterrupt inside of `with`, and does nothing outside."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, lambda *_: None)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is said of exceptions that ctypes drops: an interrupt may hit that, too."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


def evaluated(llm: Llama, batch: list[int], before: int) -> bool:
    """Evaluates a batch once; whether it was done. A fault leaves the context as it was."""
    try:
        with Gate():
            llm.eval(batch)
    except (KeyboardInterrupt, ReadError, MemoryError, Struck):
        pass
    return llm.n_tokens == before + len(batch)


def run_struck(load: Load, library: Library, seed: int, strikes: int) -> dict[str, int]:
    """Evaluates the prompts in turn until there were so many strikes."""
    made: list[Unruly] = []

    def wrap(inner: object) -> Unruly:
        made.append(Unruly(inner))  # type: ignore[arg-type]
        return made[0]

    rng = random.Random(seed)
    settings = {
        "overlap": rng.random() < 0.7,
        "io_threads": rng.choice([1, 2, 4]),
        "prefetch": rng.choice([0, 0, 2]),
    }
    llm = load(NAME, cache_mb=4, wrap_reader=wrap, **settings)
    striker = Striker(seed, llm, made[0])
    striker.start()
    tries = batches = 0
    try:
        for index in itertools.count():
            if sum(striker.strikes.values()) >= strikes:
                break
            prompts, expected = PROMPTS[index % 2], library.resident(NAME)[index % 2]
            llm.reset()
            for number, batch in enumerate(prompts):
                llm.phase = "decode" if number else "prefill"
                before = llm.n_tokens
                batches += 1
                while not evaluated(llm, batch, before):
                    tries += 1
                    assert llm.n_tokens == before, settings
                row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
                np.testing.assert_array_equal(row, expected[number], str((seed, settings, number)))
    finally:
        striker.stop()
    return {**striker.strikes, "batches": batches, "repeated": tries}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", range(4))
def test_strikes(load: Load, library: Library, quiet: None, seed: int) -> None:
    assert run_struck(load, library, seed, strikes=15)["repeated"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_many_strikes(load: Load, library: Library, quiet: None) -> None:
    for seed in range(100, 140):
        print(seed, run_struck(load, library, seed, strikes=60))
