"""What is reported of a trace of reads."""

from __future__ import annotations

import numpy as np

from routeahead.telemetry.io_trace import report


def test_early_reads_that_were_read_again_are_found() -> None:
    columns = {
        "step": np.array([0, 0, 0, 1]),
        "phase": np.array(["decode"] * 4),
        "kind": np.array(["committed", "demand", "demand", "demand"]),
        "layer": np.array([3, 3, 3, 3]),
        "expert": np.array([5, 5, 6, 5]),
        "projection": np.array(["up"] * 4),
        "bytes": np.array([10, 10, 10, 10]),
        "latency_s": np.zeros(4),
    }
    found = report(columns)
    assert found.early_again == 1
    assert found.redundancy == 0.5  # expert 5 twice again, of four equal reads
