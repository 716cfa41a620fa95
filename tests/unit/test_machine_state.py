"""What a benchmark records about the machine."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

from routeahead.bench import machine_state
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
