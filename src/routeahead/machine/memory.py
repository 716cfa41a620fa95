"""How much memory this process may still take, container limits counted."""

from __future__ import annotations

import psutil

from routeahead.machine.cgroup import own_hierarchy


def available_bytes() -> int:
    """Bytes that can be taken without swapping: the smaller of the machine's and the cgroup's."""
    machine = int(psutil.virtual_memory().available)
    hierarchy = own_hierarchy()
    group = hierarchy.free_bytes() if hierarchy else None
    return machine if group is None else min(machine, group)
