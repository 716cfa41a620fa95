"""How many threads this process should compute with.

A thread too many costs more than it brings: the threads of a matrix product wait for each other, so
each waits for the one that the kernel lets run last. At a quota of one core, two threads take 25
times as long as one.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from pathlib import Path

from routeahead.machine.cgroup import cpu_quota

_LOOKS, _BETWEEN_S = 5, 0.004  # how often, and how far apart, the running threads are counted


def default_threads() -> int:
    """Cores that this process may use and that nobody else uses now, at least one.

    Hyper-threads of one core count once. The quota of control groups is rounded down: what does not
    reach for a whole core would stop all threads at the end of each period.
    """
    allowed = _allowed()
    quota = cpu_quota()
    threads = len({_core(cpu) for cpu in allowed})
    if quota is not None:
        threads = min(threads, math.floor(quota))
    return max(1, min(threads, len(allowed) - _others(len(allowed))))


def usable_cores() -> float:
    """Cores that this process may use: its CPUs, or the quota of its control groups if smaller."""
    quota = cpu_quota()
    return min(len(_allowed()), quota or math.inf)


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))  # macOS


def _core(cpu: int) -> str:
    """A name for the core of a CPU: the list of its hyper-threads."""
    file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return file.read_text().strip()
    except OSError:
        return str(cpu)


def _others(allowed: int) -> int:
    """Threads of other processes that run on this process's CPUs now, rounded down.

    The kernel counts those of the whole machine; they are taken to be spread evenly.
    """
    looks = []
    for look in range(_LOOKS):
        time.sleep(_BETWEEN_S if look else 0)
        looks.append(_running())
    others = max(0, statistics.median(looks) - 1)  # this thread runs as it looks
    return int(others * allowed / (os.cpu_count() or 1))


def _running() -> int:
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("procs_running"):
                return int(line.split()[1])
    except OSError:
        pass  # not Linux
    return 1
