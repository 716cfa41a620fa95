"""How much memory this process may still take, container limits counted."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# A v1 "no limit" is a number near 2^63.
_NO_LIMIT = 1 << 60


def available_bytes() -> int:
    """Bytes that can be taken without swapping: the smaller of the machine's and the cgroup's."""
    free = int(psutil.virtual_memory().available)
    inside = _cgroup_free()
    return free if inside is None else min(free, inside)


def _cgroup_free() -> int | None:
    """Bytes left under the tightest memory cgroup above this process; None without a limit."""
    left: list[int] = []
    for own, limit, usage, cache_key in _controllers():
        for folder in (own, *own.parents):
            free = _left(folder, limit, usage, cache_key)
            if free is not None:
                left.append(free)
    return min(left, default=None)


def _controllers() -> list[tuple[Path, str, str, str]]:
    """(folder of this process, limit file, usage file, key of its page cache) for v1 and v2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "":
            found.append((_CGROUP / path.lstrip("/"), "memory.max", "memory.current", "file"))
        elif "memory" in names.split(","):
            folder = _CGROUP / "memory" / path.lstrip("/")
            v1 = (folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
            found.append(v1)
    return found


def _left(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == "max" or int(limit) > _NO_LIMIT:
            return None
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - usage + int(stat.get(cache_key, 0)))
