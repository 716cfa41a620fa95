"""Fixtures that every test may use."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.library import CONTEXT, THREADS, Library

from routeahead import Llama

# A shell ignores SIGINT for what it starts in the background, and children inherit that; the tests
# that interrupt a run need it to arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("models"))


@pytest.fixture
def load(library: Library) -> Callable[..., Llama]:
    """Loads a fixture model with streaming settings; closed when the test ends."""
    opened: list[Llama] = []

    def open_model(name: str, *, shards: int = 1, **settings: object) -> Llama:
        llm = Llama(
            library.path(name, shards),
            n_ctx=CONTEXT,
            n_batch=CONTEXT,
            n_threads=THREADS,
            **settings,
        )
        opened.append(llm)
        return llm

    yield open_model
    for llm in opened:
        llm.close()
