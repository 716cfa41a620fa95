"""Keeps llama.cpp out of the unit tests: what they test must work without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

HEAVY = {"llama_cpp"}


@pytest.fixture(autouse=True)
def no_heavy_import() -> Iterator[None]:
    """Fails the test that imports one. Says nothing once the tests of another folder, in the same
    process, have imported them; `test_imports.py` has a process of its own."""
    before = HEAVY & sys.modules.keys()
    yield
    assert HEAVY & sys.modules.keys() == before
