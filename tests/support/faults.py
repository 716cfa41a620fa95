"""Faults in the eval callback's stops, for the tests of both ways to decode."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from routeahead import Llama
from routeahead.llamacpp.eval_callback import EvalCallback

STOPS = ["routed", "product", "streams", "final_weights"]


class Fault(Exception):
    """What no code of ours catches by name."""


class RaisingStop:
    """Wraps a stop of the stream: raises on one call, and counts all."""

    def __init__(self, stop: Callable[..., Any], error: type[BaseException], call: int) -> None:
        self._stop, self._error, self._call = stop, error, call
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self._call:
            raise self._error
        return self._stop(*arguments)


class CutShort(EvalCallback):
    """An eval callback from which an exception escapes once it is armed; ctypes drops it."""

    armed = False

    def _on_stop(self, address: int, ask: int) -> int:
        if self.armed:
            raise Fault
        return super()._on_stop(address, ask)


def interrupt_next_read(llm: Llama) -> None:
    """A real SIGINT arrives while the evaluation thread waits for a lane."""
    reader = llm.streamed._reader
    read, main = reader.read, threading.main_thread().ident

    def interrupted(shard: int, offset: int, view: memoryview, need: int) -> int:
        reader.read = read  # type: ignore[method-assign]
        signal.pthread_kill(main or 0, signal.SIGINT)
        time.sleep(0.05)
        return read(shard, offset, view, need)

    reader.read = interrupted  # type: ignore[method-assign]
