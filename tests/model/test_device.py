"""Dense layers on a device: run once more, in a process that has one (`support/rpc_device.py`).

The children's last line counts what was read from the device: a run that did not touch it would
prove nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.rpc_device import ROOT, Unavailable, backend

HERE = Path(__file__).parent
# What each kind of the existing tests says on a device: identity with every architecture, reads
# that are late or missing, faults, predictions, dropping, guesses. Of 6 blocks and the output, 4
# go there in the partial runs: the routers of some layers are on the CPU and of others are not.
DAILY = {
    "all": [
        "test_identity.py::test_same_logits_another_way[qwen3moe-delayed]",
        "test_identity.py::test_same_logits_another_way[gpt-oss-delayed-lanes]",
        "test_identity.py::test_same_logits_another_way[gemma4-delayed-serial]",
        "test_identity.py::test_same_logits_another_way[deepseek2-grouped-mapped-dense]",
        "test_identity.py::test_same_logits[qwen3moe-full-overlap-1lanes-1files-direct]",
        "test_faults.py::test_exception_at_every_stop",
    ],
}


@pytest.fixture(scope="module")
def device() -> None:
    try:
        backend()
    except Unavailable as error:
        pytest.skip(f"no device: {error}")


def run(layers: str, *selected: str, timeout: int = 100) -> dict[str, int]:
    """Runs tests with that many layers on the device; returns what was counted."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.on_device", *selected]
    environment = {**os.environ, "ROUTEAHEAD_TEST_LAYERS": layers}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    counted = re.search(r"^device: copies=(\d+) values=(\d+)$", done.stdout, re.MULTILINE)
    assert passed and counted, done.stdout
    return {"passed": int(passed[1]), "copies": int(counted[1]), "values": int(counted[2])}
