"""Processes for tests: with a memory limit, or in the background."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from routeahead.bench.memory_limit import MemoryLimit
from routeahead.errors import SettingsError


@contextmanager
def memory_limit(mib: int) -> Iterator[MemoryLimit]:
    """A control group with a limit; skips the test if the system does not permit one."""
    group = MemoryLimit(mib << 20)
    try:
        group.__enter__()
    except SettingsError as error:
        pytest.skip(str(error))
    try:
        yield group
    finally:
        group.__exit__(None, None, None)


def limited(mib: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command with bounded memory."""
    with memory_limit(mib) as group:
        return subprocess.run(
            group.wrap(command), capture_output=True, text=True, timeout=100, check=False
        )
