"""A process that eats the memory of a group."""

from __future__ import annotations

from routeahead.bench.memory_limit import MemoryLimit
from routeahead.experts.layout import MIB
from routeahead.machine.cgroup import own_hierarchy, read_counts

EATER = """
import sys, time
eaten = []
for _ in range(int(sys.argv[1]) // 5):
    eaten.append(b"x" * (5 << 20))
    time.sleep(0.05)
time.sleep(1)
"""
"""Takes as many MiB as its argument says, 5 at a time, and holds them for a second."""


def mib_to_eat(group: MemoryLimit, limit: int) -> int:
    """MiB that are left of the group's `limit` (MiB), where page cache counts as left."""
    hierarchy = own_hierarchy()
    assert hierarchy
    files = hierarchy.files
    counts = read_counts(group.folder / "memory.stat")
    held = int((group.folder / files.usage).read_text())
    return limit - (held - sum(counts[key] for key in files.cache)) // MIB
