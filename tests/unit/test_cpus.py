"""How many threads compute: affinity, quotas of nested groups, and what others run."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from routeahead.engine.starved import Starved
from routeahead.machine import cpus
from routeahead.machine.cgroup import Hierarchy, cpu_quota, find_hierarchy, own_hierarchy
from routeahead.telemetry.counters import Totals

V1_CPU = "32 31 0:29 / /cg/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


def test_the_cpu_controller_is_found() -> None:
    found = find_hierarchy(V1_CPU, "4:memory:/m\n1:cpu,cpuacct:/jobs\n", "cpu")
    assert found and (found.version, str(found.own)) == (1, "/cg/cpu/jobs")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_quota_counts(tmp_path: Path, version: int) -> None:
    mount, own = tmp_path / "mount", tmp_path / "mount/outer/own"
    own.mkdir(parents=True)

    def write(group: Path, quota: int) -> None:
        if version == 2:
            (group / "cpu.max").write_text(f"{quota if quota > 0 else 'max'} 100000\n")
        else:
            (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (group / "cpu.cfs_period_us").write_text("100000\n")

    write(mount, -1)
    assert Hierarchy(version, mount, own).cores() is None
    write(own.parent, 150_000)
    write(own, 300_000)
    assert Hierarchy(version, mount, own).cores() == 1.5


@pytest.mark.parametrize(
    ("allowed", "quota", "running", "expected"),
    [
        (8, None, 1, 8),
        (8, 2.9, 1, 2),
        (8, 0.5, 1, 1),
        (2, None, 1, 2),
        (8, None, 4, 5),  # three others run
        (8, 6.0, 4, 5),
        (8, None, 50, 1),
        (4, None, 5, 2),  # of four others on eight CPUs, two are taken to be on these
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch,
    allowed: int,
    quota: float | None,
    running: int,
    expected: int,
) -> None:
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cpus, "_allowed", lambda: set(range(allowed)))
    monkeypatch.setattr(cpus, "_core", str)
    monkeypatch.setattr(cpus, "_running", lambda: running)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert cpus.default_threads() == expected


def test_hyper_threads_of_one_core_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "cpu_quota", lambda: None)
    monkeypatch.setattr(cpus, "_allowed", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(cpus, "_core", lambda cpu: str(cpu // 2))
    monkeypatch.setattr(cpus, "_running", lambda: 1)
    assert cpus.default_threads() == 2


@pytest.fixture
def quota_group() -> Iterator[Path]:
    """A control group with a quota of one core; the test is skipped where that is not permitted."""
    hierarchy = own_hierarchy("cpu")
    if hierarchy is None or hierarchy.version != 1:
        pytest.skip("no control groups of version 1 with a CPU controller")
    group = hierarchy.own / f"routeahead-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        pytest.skip(f"{group}: {error.strerror}")
    yield group
    group.rmdir()


def test_a_real_quota(quota_group: Path) -> None:
    script = (
        "from routeahead.machine.cpus import default_threads, usable_cores\n"
        "print(default_threads(), usable_cores())\n"
    )
    enter = f'echo $$ > {quota_group}/cgroup.procs && exec "$@"'
    command = ["/bin/sh", "-c", enter, "sh", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1 1.0\n"
    assert cpu_quota() != 1.0


def test_tokens_that_wait_for_cores_are_noticed_once() -> None:
    starved = Starved()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(48):
            starved.add("decode", Totals(tokens=1, wall_s=1.0, stall_s=0.8, cpu_s=0.1))
            starved.add("prefill", Totals(tokens=1, wall_s=9.0, cpu_s=0.1))
    with pytest.warns(
        UserWarning, match="tokens take 10 times their CPU time.*n_threads=1"
    ) as told:
        for _ in range(80):
            starved.add("decode", Totals(tokens=1, wall_s=1.5, stall_s=0.5, cpu_s=0.1))
    assert len(told) == 1
