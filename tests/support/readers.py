"""Readers that sit between a lane and the disk and make its life hard."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence

from routeahead.errors import ReadError
from routeahead.experts.reader import Reader


class Delayed:
    """Delays each read by a random time, so that reads finish in another order."""

    def __init__(self, inner: Reader, *, seed: int = 0, longest_s: float = 0.001) -> None:
        self._inner, self._longest_s = inner, longest_s
        self._random, self._lock = random.Random(seed), threading.Lock()

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        with self._lock:
            delay = self._random.uniform(0, self._longest_s)
        time.sleep(delay)
        return self._inner.read(shard, offset, view, need)

    def close(self) -> None:
        self._inner.close()


# Ways to stream that must all give the same logits.
WAYS: dict[str, dict[str, object]] = {
    "mapped-dense": {"dense": "mmap", "poison": True},
    "delayed": {"wrap_reader": Delayed, "poison": True},
    "delayed-lanes": {"wrap_reader": Delayed, "io_threads": 4},
    "delayed-serial": {"wrap_reader": Delayed, "overlap": False},
}


class Failing:
    """Runs `fault` instead of the read whenever `when(number of the read)` says so."""

    def __init__(
        self, inner: Reader, when: Callable[[int], bool], fault: Callable[[], int]
    ) -> None:
        self._inner, self._when, self._fault = inner, when, fault
        self._count, self._lock = 0, threading.Lock()
        self.armed = False

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        with self._lock:
            self._count += self.armed
            fails = self.armed and self._when(self._count)
        return self._fault() if fails else self._inner.read(shard, offset, view, need)

    def close(self) -> None:
        self._inner.close()


def disk_error() -> int:
    raise ReadError("model.gguf: reading 4096 bytes at offset 8192 failed: Input/output error")


class Unruly:
    """Delays each read by a random time that the test can change between prompts; can be told to
    interrupt the run or to fail at a read."""

    def __init__(self, inner: Reader) -> None:
        self._inner, self._lock, self._random = inner, threading.Lock(), random.Random(0)
        self._delayed: Reader = inner
        self._reads = self._strike = 0
        self._fault = disk_error

    def schedule(self, seed: int, longest: Sequence[float] = (0, 0.0005, 0.0015)) -> None:
        delay = random.Random(seed).choice(longest)
        self._delayed = Delayed(self._inner, seed=seed, longest_s=delay)

    def strike(self, after: int, fault: Callable[[], int]) -> None:
        """At the `after`th read from now, `fault` happens instead."""
        self._reads, self._strike, self._fault = 0, after, fault

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        with self._lock:
            self._reads += 1
            struck = self._reads == self._strike
        return self._fault() if struck else self._delayed.read(shard, offset, view, need)

    def close(self) -> None:
        self._inner.close()


def interrupt() -> int:
    """Not with a poisoned arena: a signal that arrives as the graph asks about a product cuts the
    callback short, and llama.cpp still runs that product, for nobody, on bytes that are missing."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    raise ReadError("interrupted")
