"""Writes a routing trace without its prompt.

    python benchmarks/trim_trace.py trace.csv short.csv

The prompt's last token stays as a prompt of one, and decoded tokens follow at position 1. Replaying
a long prompt reads most of a model's experts before the first decoded token: at 48 layers of a 30B
model 12 GB, which has nothing to do with decode and uses up the time for which a disk is fastest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from routeahead.telemetry.route_trace import COLUMNS, PHASES, read_trace
from routeahead.telemetry.table import open_table


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    trace = read_trace(source)
    phase, step = trace.slots[:, COLUMNS.index("phase")], trace.slots[:, COLUMNS.index("step")]
    last = step[phase == PHASES.index("decode")].min() - 1
    kept = trace.slots[step >= last]
    kept[:, COLUMNS.index("step")] -= last
    types = dict.fromkeys(COLUMNS, "int64")
    table = open_table(target, types, {"layers": trace.expert_bytes})
    table.add(list(kept.T))
    table.close()


if __name__ == "__main__":
    main()
