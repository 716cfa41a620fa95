"""Trace files of a run: what a killed one leaves, and what a run without them does not load."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from routeahead.llamacpp.gguf_file import read_layout
from routeahead.models import DEFAULT_MODEL
from routeahead.telemetry.io_trace import read_io_trace
from routeahead.telemetry.route_trace import read_trace

TOKENS = [5, 6, 7]


def test_csv_traces_have_every_batch(tmp_path: Path) -> None:
    routes, reads = tmp_path / "routes.csv", tmp_path / "reads.csv"
    code = (
        "import os, signal, sys; from pathlib import Path; from routeahead import Llama; "
        "from routeahead.models import DEFAULT_MODEL; "
        "from routeahead.telemetry.recorder import Outputs; "
        "routes, reads = map(Path, sys.argv[1:]); "
        "llm = Llama(DEFAULT_MODEL, n_ctx=64, n_threads=1, cache_mb=0, "
        "outputs=Outputs(route_trace=routes, io_trace=reads)); "
        f"[llm.eval([token]) for token in {TOKENS}]; "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(routes), str(reads)], check=False)
    assert killed.returncode == -signal.SIGKILL
    layout = read_layout(DEFAULT_MODEL)
    layers = layout.moe_layers
    slots = len(TOKENS) * len(layers) * layout.n_expert_used
    assert len(read_trace(routes).slots) == slots
    assert len(read_io_trace(reads)["bytes"]) == 3 * slots  # projections; without a cache


def test_a_run_without_traces_does_not_import_pyarrow() -> None:
    code = (
        "import sys, routeahead.cli.main, routeahead.engine.llama; "
        "sys.exit('pyarrow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
