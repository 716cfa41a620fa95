"""Where a process's memory is accounted, and what the limits of nested groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from routeahead.machine.cgroup import V1 as V1_FILES
from routeahead.machine.cgroup import V2 as V2_FILES
from routeahead.machine.cgroup import Files, Hierarchy, find_hierarchy
from routeahead.machine.memory import parse_pressure

V1 = "33 25 0:30 / /cg/memory rw,relatime - cgroup cgroup rw,memory\n"
V2 = "41 31 0:38 / /cg/unified rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
CPU = "32 31 0:29 / /cg/cpu rw,relatime - cgroup cgroup rw,cpu\n"


@pytest.mark.parametrize(
    ("mounts", "groups", "version", "parent"),
    [
        (CPU + V1 + V2, "4:memory:/jobs/a\n1:cpu:/\n0::/\n", 1, "/cg/memory/jobs/a"),
        (CPU + V2, "1:cpu:/\n0::/user.slice/shell.scope\n", 2, "/cg/unified/user.slice"),
        (V2, "0::/\n", 2, "/cg/unified"),
        # A container that sees the host's names: the mount's root is the container's group.
        (V1.replace(" / ", " /docker/1 "), "4:memory:/docker/1/x\n", 1, "/cg/memory/x"),
    ],
)
def test_memory_controller_is_found(mounts: str, groups: str, version: int, parent: str) -> None:
    found = find_hierarchy(mounts, groups)
    assert found and (found.version, str(found.parent)) == (version, parent)


def test_no_memory_controller() -> None:
    assert find_hierarchy(CPU, "1:cpu:/\n") is None
    assert find_hierarchy(V1.replace(" / ", " /other "), "4:memory:/own\n") is None


def write_group(
    folder: Path, files: Files, limit: str, usage: int, cache: int, high: str = ""
) -> None:
    """A group with that much page cache, half of it active, and a tmpfs of 100 bytes beside it."""
    folder.mkdir()
    if high:
        (folder / files.limits[1]).write_text(f"{high}\n")
    (folder / files.limit).write_text(f"{limit}\n")
    (folder / files.usage).write_text(f"{usage}\n")
    halves = "".join(f"{key} {cache // 2}\n" for key in files.cache)
    total = "total_" if files is V1_FILES else ""
    tmpfs = f"{total}shmem 100\n{total}cache {cache + 100}\nfile {cache + 100}\n"
    (folder / "memory.stat").write_text(f"anon 1\n{halves}{tmpfs}")


@pytest.mark.parametrize(("version", "files"), [(1, V1_FILES), (2, V2_FILES)])
def test_the_tightest_limit_above_a_process_counts(
    tmp_path: Path, version: int, files: Files
) -> None:
    unlimited = str(2**63 - 4096) if version == 1 else "max"
    mount, outer = tmp_path / "mount", tmp_path / "mount/outer"
    own = outer / "own"
    write_group(mount, files, unlimited, usage=900, cache=0)
    write_group(outer, files, "1000", usage=700, cache=250)
    write_group(own, files, "800", usage=200, cache=50)
    assert Hierarchy(version, mount, own).free_bytes() == 550  # outer's; own has 650
    write_group(outer / "small", files, "300", usage=310, cache=0)
    assert Hierarchy(version, mount, outer / "small").free_bytes() == 0
    assert Hierarchy(version, mount, mount).free_bytes() is None


def test_a_limit_outside_of_the_mount_does_not_count(tmp_path: Path) -> None:
    write_group(tmp_path / "outside", V2_FILES, "100", usage=0, cache=0)
    mount = tmp_path / "outside/mount"
    write_group(mount, V2_FILES, "max", usage=0, cache=0)
    assert Hierarchy(2, mount, mount / "own").free_bytes() is None


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    """Beyond it a group is slowed down until it crawls."""
    write_group(tmp_path / "mount", V2_FILES, "1000", usage=300, cache=0, high="max")
    write_group(tmp_path / "mount/own", V2_FILES, "1000", usage=300, cache=0, high="500")
    assert Hierarchy(2, tmp_path / "mount", tmp_path / "mount").free_bytes() == 700
    assert Hierarchy(2, tmp_path / "mount", tmp_path / "mount/own").free_bytes() == 200


def test_pressure_is_read_as_the_kernel_writes_it() -> None:
    text = "some avg10=12.50 avg60=3.10 avg300=0.81 total=127\nfull avg10=9.00 total=3\n"
    assert parse_pressure(text) == 12.5
