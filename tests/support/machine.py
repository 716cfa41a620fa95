"""A machine whose free memory the test sets."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from routeahead import Llama
from routeahead.engine import budget
from support.library import CONTEXT, THREADS


class Machine:
    """A machine with as much free memory as the test says, less what the caches have taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = 64 << 30
        self.models: list[Llama] = []
        monkeypatch.setattr(budget, "available_bytes", self.available)
        monkeypatch.setattr(budget, "_LOOK_S", 3600)  # the tests look

    def available(self) -> int:
        return self.total - sum(one._held() for one in budget._all)

    def new(self, path: Path, **settings: object) -> Llama:
        llm = Llama(path, n_ctx=CONTEXT, n_batch=CONTEXT, n_threads=THREADS, **settings)
        self.models.append(llm)
        return llm

    @staticmethod
    def look(llm: Llama) -> None:
        """What the watcher does four times a second."""
        llm.streamed.budget.look()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    gc.collect()  # models of other tests
    assert not budget._all
    made = Machine(monkeypatch)
    yield made
    for llm in made.models:
        llm.close()
