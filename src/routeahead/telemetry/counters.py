"""What a run counts, and what each figure means.

Times of a decoded token:

* *wall*: inside llama_decode.
* *stall*: the evaluation thread waits for bytes. *adoption* is the part of it in which it waits for
  reads that were begun early.
* *management*: its bookkeeping. Lookups, evictions, issuing reads, and with route-ahead predicting
  inline or waiting for a worker's prediction.
* *compute*: the rest of *wall*.
* *io*: lanes are in reads. They work beside compute and beside each other, so it is no part of
  *wall*.

Bytes are physical: whole blocks as read from the file. The cache's size may change as other
programs need memory: *cache* is its budget at the end, *cache least* the smallest that it was, and
*cache resizes* how often it changed.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from routeahead.types import Phase


@dataclass
class Totals:
    """Sums over the tokens of one phase. Seconds and bytes.

    Attributes:
        tokens: rows evaluated.
        batches: calls of llama_decode.
        hits, misses: experts that a layer asked for and that the cache had, or had not; what was
            read early for it counts as a miss.
        evictions: experts that left the cache for others.
        rereads: misses of experts that had been read before: evicted since, or read ahead of a
            prompt's layer that then did not use them.
        early_bytes: of reads that a lane began before their layer asked.
        dropped: slots that were not read, and computed with weight 0.
        committed, passed_through: routings that route-ahead decided, and that it should have.
        compared_slots, agreed_slots: committed ones whose router was asked too, and those on which
            it agreed.
        gemv_s, issue_s, wait_s, watchdog_s: see `prediction.consumer.PredictionTimes`.
        drafts, draft_bytes: batches with guesses (`engine.speculation`), and the bytes they read.
        drafted, accepted: rows that were guesses, and guesses that were right.
    """

    tokens: int = 0
    batches: int = 0
    wall_s: float = 0.0
    stall_s: float = 0.0
    adopt_s: float = 0.0
    mgmt_s: float = 0.0
    io_s: float = 0.0
    cpu_s: float = 0.0
    bytes_read: int = 0
    reads: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rereads: int = 0
    early_bytes: int = 0
    dropped: int = 0
    committed: int = 0
    passed_through: int = 0
    compared_slots: int = 0
    agreed_slots: int = 0
    gemv_s: float = 0.0
    issue_s: float = 0.0
    wait_s: float = 0.0
    watchdog_s: float = 0.0
    drafts: int = 0
    draft_bytes: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def kept(self) -> int:
        """Rows that became a part of the text."""
        return self.tokens - self.drafted + self.accepted

    @property
    def compute_s(self) -> float:
        return self.wall_s - self.stall_s - self.mgmt_s

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def minus(self, other: Totals) -> Totals:
        return Totals(**{name: value - getattr(other, name) for name, value in vars(self).items()})

    def per_token(self, name: str) -> float:
        return float(getattr(self, name)) / self.kept if self.kept else 0.0


@dataclass
class Counters:
    """A model's counters since it was loaded."""

    load_s: float = 0.0
    prefill: Totals = field(default_factory=Totals)
    decode: Totals = field(default_factory=Totals)

    def totals(self, phase: Phase) -> Totals:
        return self.decode if phase == "decode" else self.prefill


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far.

    getrusage's figure is not used where /proc exists: it includes what the process held between
    its fork and the start of this program, which is the memory of its parent.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_s() -> float:
    """CPU time of this process, all threads."""
    return time.process_time()


def share(part: int, whole: int) -> str:
    """A part of a whole as a percentage; "-" if there is no whole."""
    return f"{part / whole:.1%}" if whole else "-"
