"""Notices that compute threads wait for cores, and says so once."""

from __future__ import annotations

import warnings

from routeahead.machine.cpus import usable_cores
from routeahead.telemetry.counters import Totals
from routeahead.types import Phase

_TOKENS = 16  # decoded tokens that are looked at together
_TIMES = 4.0  # wall time, waits for bytes left out, over CPU time


class Starved:
    """Looks at decoded tokens: a token that computes takes at least as much CPU time as wall time.

    If it takes a fraction of that, its threads wait for a core: others use it, or a quota is used
    up. Then fewer threads are faster, because each step waits for the slowest of them.
    """

    def __init__(self) -> None:
        self._seen = Totals()
        self._told = False

    def add(self, phase: Phase, step: Totals) -> None:
        """Counts a batch; warns if enough of them took too long."""
        if self._told or phase != "decode":
            return
        seen = self._seen
        seen.tokens += step.tokens
        seen.wall_s += step.wall_s - step.stall_s
        seen.cpu_s += step.cpu_s
        if seen.tokens < _TOKENS:
            return
        times = seen.wall_s / max(seen.cpu_s, 1e-9)
        self._seen = Totals()
        if times > _TIMES:
            self._told = True
            warnings.warn(
                f"tokens take {times:.0f} times their CPU time: the cores are in use by others, or "
                f"limited ({usable_cores():.3g} may be used); fewer threads may be faster "
                "(n_threads=1, -t 1)",
                stacklevel=6,
            )
