"""What is reported of a trace of reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from routeahead.experts.lanes import ReadRecord
from routeahead.telemetry.io_trace import IoTrace, read_io_trace, report


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


def test_wrong_guesses_are_no_tokens(tmp_path: Path) -> None:
    """A prompt of 5, then batches of 1 row, 4 (3 guesses, 2 of them right) and 1 row."""
    path = tmp_path / "io.csv"
    trace = IoTrace(path, 0.0)
    for phase, tokens, right in (
        ("prefill", 5, 0),
        ("decode", 1, 0),
        ("decode", 1, 2),
        ("decode", 1, 0),
    ):
        trace.records.append(ReadRecord(0.0, 0.1, 0, "demand", 0, 1, "up", 0, 0, 4096))
        trace.end_of_batch(phase, tokens)
        for _ in range(right):
            trace.accepted()
    trace.close()
    columns = read_io_trace(path)
    assert columns["step"].tolist() == [0, 5, 6, 9]
    found = report(columns)
    assert found.decode_tokens == 5 and found.bytes_per_token == 3 * 4096 / 5
