"""The machine that a figure comes from, and the state it is in when a run starts."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import numpy as np
import psutil

from routeahead.config import Settings
from routeahead.experts.layout import BLOCK, MIB, Shard, ceil_block
from routeahead.experts.reader import FileReader
from routeahead.machine.memory import available_bytes

PROBE_S = 0.3


def describe() -> dict[str, Any]:
    """The facts of the machine that do not change between runs. Sizes in bytes."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "routeahead": version("routeahead"),
        "llama_cpp_python": version("llama-cpp-python"),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def entry_state(shards: Sequence[Shard]) -> dict[str, Any]:
    """Measures the state that a run starts in. Takes PROBE_S seconds.

    Load, clock and temperature (None if this machine does not report them), the memory in bytes
    that this process may take, and the disk's bandwidth.

    Raises:
        ReadError: the disk failed.
    """
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return {
        "load_average": os.getloadavg()[0],
        "cpu_mhz": frequency.current if frequency else None,
        "cpu_celsius": _temperature(),
        "available_bytes": available_bytes(),
        "disk": probe_disk(shards, PROBE_S),
    }


def _temperature() -> float | None:
    """The hottest sensor of any chip."""
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    return max((s.current for chip in sensors.values() for s in chip), default=None)


def probe_disk(shards: Sequence[Shard], seconds: float) -> dict[str, Any]:
    """Bandwidth in MiB/s of random 1 MiB reads of the model, by as many lanes as a run has.

    `direct` says whether they went past the page cache. If not, they say little about the disk.

    Raises:
        ReadError: the disk failed.
    """
    reader = FileReader(shards)
    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(Settings.io_threads) as pool:
            lanes = [
                pool.submit(_read_random, reader, shards, start + seconds, seed)
                for seed in range(Settings.io_threads)
            ]
            total = sum(lane.result() for lane in lanes)
        rate = total / MIB / (time.perf_counter() - start)
    finally:
        reader.close()
    return {"mib_per_s": rate, "direct": reader.direct}


def _read_random(reader: FileReader, shards: Sequence[Shard], deadline: float, seed: int) -> int:
    """Bytes read until the deadline, into one buffer: fresh pages cost as much as the disk."""
    rng, total = random.Random(seed), 0
    sizes = [shard.size for shard in shards]
    with mmap.mmap(-1, MIB) as pages, memoryview(pages) as view:
        while time.perf_counter() < deadline:
            (index,) = rng.choices(range(len(shards)), weights=sizes)
            need = min(MIB, sizes[index])
            offset = rng.randrange((sizes[index] - need) // BLOCK + 1) * BLOCK
            with view[: ceil_block(need)] as piece:
                total += reader.read(index, offset, piece, need)
    return total


def busy_cpu_s() -> float:
    """CPU seconds that all processes of this machine have taken since it started."""
    times = psutil.cpu_times()
    # Linux counts a guest's time as its host process's, too.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(value for name, value in times._asdict().items() if name not in idle))


def drop_page_cache(shards: Sequence[Shard]) -> dict[str, Any]:
    """Asks the kernel to forget the model's files; needs no privilege.

    Pages that a process has mapped stay, so what is left is measured.

    Returns:
        `dropped`: whether the kernel took the request, `why_not` otherwise, and `left_bytes`: what
        the page cache still holds (None if this system has no mincore).
    """
    if not hasattr(os, "posix_fadvise"):
        return {"dropped": False, "why_not": "no posix_fadvise here", "left_bytes": None}
    try:
        for shard in shards:
            descriptor = os.open(shard.path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    except OSError as error:
        return {"dropped": False, "why_not": error.strerror, "left_bytes": None}
    return {"dropped": True, "why_not": "", "left_bytes": cached_bytes(shards)}


def cached_bytes(shards: Sequence[Shard]) -> int | None:
    """Bytes of the files that the page cache holds; None if this system has no mincore."""
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    left = [_cached_pages(shard, mincore) for shard in shards]
    return None if None in left else sum(filter(None, left)) * mmap.PAGESIZE


def _cached_pages(shard: Shard, mincore: Any) -> int | None:
    flags = np.zeros(-(-shard.size // mmap.PAGESIZE), dtype=np.uint8)
    with shard.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        start = np.frombuffer(pages, dtype=np.uint8).ctypes.data
        failed = mincore(start, shard.size, flags.ctypes.data)
    return None if failed else int((flags & 1).sum())
