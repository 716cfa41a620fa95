"""What a benchmark records about the machine, and where it finds the memory controller."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

from routeahead.bench import machine_state
from routeahead.bench.cgroup import find_hierarchy
from routeahead.experts.layout import MIB, Shard


@pytest.mark.xdist_group("machine")
def test_dropping_the_page_cache_makes_the_disk_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (3 * MIB + 5))
    subprocess.run(["sync", str(path)], check=True)  # a page that has to be written cannot go
    shards = [Shard(path, path.stat().st_size)]
    assert machine_state.cached_bytes(shards) >= 3 * MIB
    assert machine_state.drop_page_cache(shards) == {
        "dropped": True,
        "why_not": "",
        "left_bytes": 0,
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    path.read_bytes()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) * 512 >= 3 * MIB
    assert machine_state.cached_bytes(shards) >= 3 * MIB


def test_a_file_smaller_than_a_block_can_be_probed(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x" * 100)
    # Long enough for a lane to start on a machine that is busy.
    assert machine_state.probe_disk([Shard(path, 100)], seconds=0.3)["mib_per_s"] > 0


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
