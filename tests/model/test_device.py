"""Dense layers on a device: run once more, in a process that has one (`support/rpc_device.py`).

The children's last line counts what was read from the device: a run that did not touch it would
prove nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.rpc_device import LAYERS as VARIABLE
from support.rpc_device import ROOT, Unavailable, backend

# What is needed is downloaded and compiled once: build/device.
pytestmark = pytest.mark.timeout(600)

SUITES = [
    "identity", "slot_ids", "route_ahead", "drop", "prefetch", "policy_api", "faults", "raw_decode",
    "architectures", "packed",
]  # fmt: skip
# A test of each kind: architectures that ask most different things of the stream, reads that are
# late or reordered, everything cached, every stop's fault, policies that change ids and weights.
DAILY = [
    "test_identity.py::test_same_logits_another_way[gpt-oss-delayed-lanes]",
    "test_identity.py::test_same_logits_another_way[gemma4-delayed-serial]",
    "test_identity.py::test_same_logits_another_way[deepseek2-grouped-mapped-dense]",
    "test_identity.py::test_same_logits[qwen3moe-full-serial-1lanes-1files-buffered]",
    "test_faults.py::test_exception_at_every_stop[1-routed-Fault]",
    "test_raw_decode.py::test_read_error_is_returned_and_kept",
    "test_route_ahead.py::test_committed_routing_is_the_references[gpt-oss-2]",
    "test_drop.py::test_drops_by_share_and_computes_without[deepseek2-full]",
    "test_prefetch.py::test_prefetchers_change_nothing[gemma4-predicted-worker]",
    "test_architectures.py::test_inspect_counts_what_a_run_loads",
    "test_architectures.py::test_adapters",
    "test_prefetch.py::test_substitution_is_the_references[deepseek2-grouped]",
    "test_packed.py::test_same_logits_and_a_read_an_expert[gemma4-delayed]",
]
# It counts stops: a device's top-k that was stopped at takes a further call, at the first product.
COUNTING = ["--deselect", "tests/model/test_route_ahead.py::test_off_costs_no_call"]
# It makes each product look like one that no top-k announced; a layer on a device has its ids read
# again at the product, and computes what it should.
HOST_ALONE = [
    "--deselect",
    "tests/model/test_faults.py::test_graph_without_announced_experts_is_refused",
]
# Of 6 blocks and the output, 4 layers go to the device: some routers are on the CPU, others not.
PARTIAL = "4"


@pytest.fixture(scope="module")
def device() -> None:
    try:
        backend()
    except Unavailable as error:
        pytest.skip(f"no device: {error}")


def run(layers: str, *selected: str, timeout: int = 300) -> dict[str, int]:
    """Runs tests with that many layers on the device; returns what was counted."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.on_device", *selected]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment[VARIABLE] = layers
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


def files(names: list[str]) -> list[str]:
    return [f"tests/model/{name}" for name in names]


def test_special_checks(device: None) -> None:
    counted = run("all", *files(["device_checks.py"]))
    assert counted["copies"] > 500 and counted["values"] > 50


def test_partly(device: None) -> None:
    """A test of each kind, four layers on the device."""
    counted = run(PARTIAL, *files(DAILY))
    assert counted["passed"] >= len(DAILY)
    assert counted["copies"] > 100 and counted["values"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("layers", ["all", PARTIAL])
def test_suite(device: None, layers: str, suite: str) -> None:
    """All daily tests of a kind, with all layers there and with some."""
    left_out = COUNTING + (HOST_ALONE if layers == "all" else [])
    counted = run(layers, f"tests/model/test_{suite}.py", *left_out, timeout=1500)
    assert counted["copies"] > 100
