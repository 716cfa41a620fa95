"""What other systems lack, taken away here: macOS (O_DIRECT, /proc, affinity, huge pages) and
aarch64 kernels with large pages. Neither was tested itself; docs/reliability.md says so."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from routeahead.bench import machine_state
from routeahead.experts import arena as arena_module
from routeahead.experts import reader as reader_module
from routeahead.experts.arena import HUGE, Arena, Pages, Reservation, release
from routeahead.experts.layout import BLOCK, Shard
from routeahead.experts.reader import FileReader
from routeahead.machine import cpus, memory
from routeahead.telemetry import counters

LARGE_PAGE = 16384
CONTENT = random.Random(0).randbytes(64 * BLOCK)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return Shard(path, len(CONTENT))


def test_without_o_direct_reads_are_buffered_and_past_the_cache_if_that_can_be_asked_for(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(reader_module, "O_DIRECT", 0)
    monkeypatch.setattr(reader_module, "NO_CACHE", 48)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command, value: asked.append((command, value)))
    reader = FileReader([shard])
    assert not reader.direct
    assert reader.fallback == "this system has no O_DIRECT, F_NOCACHE is set instead"
    with mmap.mmap(-1, 8 * BLOCK) as pages, memoryview(pages) as view:
        for offset in (0, 8 * BLOCK):
            assert reader.read(0, offset, view, 8 * BLOCK) == 8 * BLOCK
            assert bytes(view) == CONTENT[offset : offset + 8 * BLOCK]
    assert asked == [(48, 1)]  # once, when the file is opened
    reader.close()


def test_without_either_reads_are_plain(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "O_DIRECT", 0)
    reader = FileReader([shard])
    assert reader.fallback == "this system has no O_DIRECT" and not reader_module.NO_CACHE
    with mmap.mmap(-1, BLOCK) as pages, memoryview(pages) as view:
        assert reader.read(0, 5 * BLOCK, view, BLOCK) == BLOCK
        assert bytes(view) == CONTENT[5 * BLOCK : 6 * BLOCK]
    reader.close()


def test_without_huge_pages_addresses_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    memory = Reservation(3 * HUGE, huge=True)
    assert memory.address % HUGE == 0 and memory.range.nbytes >= 3 * HUGE
    memory.view[2 * HUGE : 2 * HUGE + 4] = b"test"
    assert bytes(memory.view[2 * HUGE : 2 * HUGE + 4]) == b"test"
    memory.close()


def test_with_large_pages_only_whole_ones_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PAGE", LARGE_PAGE)
    memory = Reservation(HUGE)
    memory.view[: 8 * BLOCK] = b"x" * 8 * BLOCK
    release(Pages(memory.address + BLOCK, 7 * BLOCK))  # blocks 1 to 7; pages are of 4 blocks
    left = [bytes(memory.view[n * BLOCK : n * BLOCK + 1]) == b"x" for n in range(8)]
    assert left == [True] * 4 + [False] * 4
    release(Pages(memory.address + BLOCK, 2 * BLOCK))  # no whole page
    assert bytes(memory.view[BLOCK : BLOCK + 1]) == b"x"
    memory.close()


def test_with_large_pages_dense_weights_can_be_mapped(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "PAGE", LARGE_PAGE)
    arena = Arena([shard])
    with shard.path.open("rb") as file:
        for start, end in ((BLOCK + 32, 3 * BLOCK), (6 * BLOCK, 9 * BLOCK + 1)):
            arena.map_file(0, start, end, file.fileno())
            view = arena.expose(0, start, end)[1]
            assert bytes(view[start % BLOCK : start % BLOCK + end - start]) == CONTENT[start:end]
    arena.close()


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(2, "No such file", str(path))

    monkeypatch.setattr(Path, "read_text", missing)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert counters.peak_rss_bytes() >= peak * 1024 > 0
    assert memory.pressure() == 0
    assert memory.available_bytes() > 0
    monkeypatch.delattr(os, "sched_getaffinity")
    assert 1 <= cpus.default_threads() <= (os.cpu_count() or 1)
    assert cpus.usable_cores() == (os.cpu_count() or 1)


def test_without_fadvise_the_page_cache_is_said_to_stay(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    assert machine_state.drop_page_cache([shard]) == {
        "dropped": False, "why_not": "no posix_fadvise here", "left_bytes": None
    }  # fmt: skip


def test_a_system_that_cannot_work_is_one_line() -> None:
    """Windows has no `preadv`."""
    code = "import os; del os.preadv; import routeahead"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: routeahead needs Linux, or macOS (untested): this system has no preadv; on "
        "Windows, use WSL 2"
    )
