"""How much memory this process may still take, container limits counted."""

from __future__ import annotations

from pathlib import Path

import psutil

from routeahead.machine.cgroup import own_hierarchy


def available_bytes() -> int:
    """Bytes that can be taken without swapping: the smaller of the machine's and the cgroup's.

    The page cache counts as free, and a tmpfs, which has nowhere to go, does not.
    """
    machine = int(psutil.virtual_memory().available)
    hierarchy = own_hierarchy()
    group = hierarchy.free_bytes() if hierarchy else None
    return machine if group is None else min(machine, group)


def pressure() -> float:
    """Percentage of the last ten seconds in which some thread of this process's group waited for
    memory (the kernel's PSI); of the machine if there are no groups; 0 if that is not counted.

    Groups of version 1 do not count it, and the machine's figure would be about other groups.
    """
    hierarchy = own_hierarchy()
    if hierarchy is None:
        file = Path("/proc/pressure/memory")
    elif hierarchy.version == 2:
        file = hierarchy.own / "memory.pressure"
    else:
        return 0.0
    try:
        return parse_pressure(file.read_text())
    except (OSError, ValueError, IndexError):
        return 0.0


def parse_pressure(text: str) -> float:
    """The figure `avg10` of the line `some` of a PSI file."""
    return float(text.partition("avg10=")[2].split(maxsplit=1)[0])
