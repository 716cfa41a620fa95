"""Processes for tests: with a memory limit, in the background, or forked."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
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


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """Status and output of a forked child that does `work` and then exits as Python does."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(receive)
            try:
                outcome = repr(work())
            except BaseException as error:
                outcome = repr(error)
            os.write(send, outcome.encode())
            status = 0
            import weakref

            weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # what waited for the lanes
        finally:
            os._exit(status)
    os.close(send)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            with os.fdopen(receive, "rb") as pipe:
                return os.waitstatus_to_exitcode(status), pipe.read().decode()
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1, "hangs"
