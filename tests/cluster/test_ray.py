"""Evaluations and benchmarks on a cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# Ray is to stay on the loopback device: without this it takes the machine's address for 127.0.0.1.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")

from routeahead.cluster import Cluster
from routeahead.errors import RouteAheadError, SettingsError
from routeahead.evaluation.evaluate import Evaluation, Request, Setting
from routeahead.evaluation.summary import Summary
from routeahead.models import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

TEXT = "Question: What is 12 + 30?\nAnswer: 42\nQuestion: What is 50 - 6?\nAnswer: 44\n" * 6
ASKED = ["What is 12 + 30?", "What is 50 - 6?", "What is the capital of France?"]
# What is dropped depends on what earlier pieces left in the cache.
SETTINGS = [
    Setting("small", {"cache_mb": 1}),
    Setting("drop", {"cache_mb": 2, "drop_cold_experts": 0.8}),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster as Nodes

    here = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    nodes = Nodes(initialize_head=True, head_node_args=here)
    nodes.add_node(num_cpus=1, node_ip_address="127.0.0.1")
    yield nodes.address
    nodes.shutdown()


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    text, prompts = tmp_path / "text.txt", tmp_path / "prompts.jsonl"
    text.write_text(TEXT)
    lines = [{"prompt": f"Question: {q}\nAnswer:", "answer": "42"} for q in ASKED]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Request(
        DEFAULT_MODEL, text=text, prompts=prompts, context=64, max_tokens=160, generate=8, threads=1
    )


def figures(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """All but the times."""
    found = [one.as_dict() for one in summaries]
    for one in found:
        del one["cost"]["s_per_token"]
    return found


def test_an_evaluation_has_the_same_figures(
    address: str, request_: Request, tmp_path: Path
) -> None:
    here = Evaluation(request_, SETTINGS, tmp_path / "here").run()
    with Cluster(address) as cluster:
        assert len(cluster.nodes) == 2
        there = Evaluation(request_, SETTINGS, tmp_path / "there").spread(cluster)
        assert figures(there) == figures(here)
        assert figures(here)[2]["text"]["kl_mean"] > 0  # it did drop
        # One more setting in the same folder: the baseline's logits are made anew.
        more = [*SETTINGS, Setting("two", {"cache_mb": 2})]
        again = Evaluation(request_, more, tmp_path / "there").spread(cluster)
        assert figures(again)[:3] == figures(here)
        assert again[3].text and again[3].text["kl_mean"] == 0


def test_a_setting_that_fails_is_named(address: str, request_: Request, tmp_path: Path) -> None:
    bad = Setting("bad", {"cache_mb": 2, "n_expert_used": 999})
    with Cluster(address) as cluster, pytest.raises(RouteAheadError, match=r"^bad: ") as failed:
        Evaluation(request_, [bad], tmp_path / "work").spread(cluster)
    assert "\n" not in str(failed.value)


def test_a_pass_of_a_benchmark_stays_on_one_node(address: str, tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    command = [sys.executable, "-m", "routeahead", "bench", "--ray", address, "--passes", "4"]
    command += ["--tokens", "4", "-t", "1", "--json", str(report)]
    command += ["--cell", "none:--cache-mb 0", "--cell", "two:--cache-mb 2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert len(found["runs"]) == 8 and not any(run["error"] for run in found["runs"])
    assert found["summary"][1]["ratios"]["tok_per_s"]["pairs"] == 4
    for index in range(4):
        passed = [run for run in found["runs"] if run["pass_index"] == index]
        assert [run["position"] for run in passed] == [0, 1]
        assert {run["cell"] for run in passed} == {"none", "two"}
        assert len({run["machine"]["node"] for run in passed}) == 1


def test_no_cluster_is_one_line() -> None:
    with pytest.raises(SettingsError, match=r"^--ray 127\.0\.0\.1:1: cannot connect"):
        Cluster("127.0.0.1:1")
