"""Fixtures that every test may use.

llama.cpp is imported by the fixtures that need it: the tests in `unit` run without it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.library import Library

    from routeahead import Llama

# The user's own defaults are no part of a test.
os.environ["ROUTEAHEAD_CONFIG"] = os.devnull

# A shell ignores SIGINT for what it starts in the background, and children inherit that; the tests
# that interrupt a run need it to arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    """A test may have left another handler, and SIGINT's default would end this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    from support.library import Library

    return Library(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 75 MB of experts: enough to see whether its memory is given back."""
    from support.models import Spec, write

    spec = Spec("qwen3moe", width=256, experts=32, expert_width=256, quant="F16")
    return write(tmp_path_factory.mktemp("large") / "model.gguf", spec)


@pytest.fixture
def load(library: Library) -> Iterator[Callable[..., Llama]]:
    """Loads a fixture model with streaming settings and hooks; closed when the test ends."""
    from support.library import CONTEXT, THREADS

    from routeahead import Llama
    from routeahead.engine.streamed_model import Hooks

    opened: list[Llama] = []

    def open_model(name: str, *, shards: int = 1, packed: bool = False, **settings: Any) -> Llama:
        hooks = {hook: settings.pop(hook) for hook in ("wrap_reader", "poison") if hook in settings}
        llm = Llama(
            library.packed(name, shards) if packed else library.path(name, shards),
            n_ctx=CONTEXT,
            n_batch=CONTEXT,
            n_threads=THREADS,
            _hooks=Hooks(**hooks),
            **settings,
        )
        opened.append(llm)
        return llm

    yield open_model
    for llm in opened:
        llm.close()
