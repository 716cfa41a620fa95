"""Files that end early, change, lie or cannot be opened: an error, and never wrong bytes."""

from __future__ import annotations

import mmap
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from routeahead.errors import ModelError, ReadError, SettingsError
from routeahead.experts import reader as reader_module
from routeahead.experts.arena import Arena
from routeahead.experts.dense import read_dense
from routeahead.experts.lanes import Lanes
from routeahead.experts.layout import BLOCK, ExpertTensor, Shard, TensorInfo
from routeahead.experts.reader import CHECK_EVERY, FileReader
from routeahead.experts.reads import Read, Ticket
from routeahead.experts.slots import Slots

BLOCKS = 64


@pytest.fixture
def view() -> Iterator[memoryview]:
    with mmap.mmap(-1, 8 * BLOCK) as pages, memoryview(pages) as whole:
        yield whole


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    path = tmp_path / "model.gguf"
    path.write_bytes(random.Random(0).randbytes(BLOCKS * BLOCK))
    return Shard(path, BLOCKS * BLOCK)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("rest", [0, 1, 700, 1024, 4095])
def test_a_file_cut_while_in_use_ends_the_read(
    shard: Shard, view: memoryview, direct: bool, rest: int
) -> None:
    reader = FileReader([shard], direct=direct)
    reader.read(0, 0, view, 8 * BLOCK)
    os.truncate(shard.path, 2 * BLOCK + rest)
    with pytest.raises(ReadError, match=rf"ends {6 * BLOCK - rest} bytes early"):
        reader.read(0, 0, view, 8 * BLOCK)
    reader.close()


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5 * BLOCK)
        file.write(b"other")


def _replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(BLOCKS * BLOCK))
    other.replace(path)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("change", [_overwrite, _replace, _append])
def test_a_changed_file_is_noticed_within_a_count_of_reads(
    shard: Shard, view: memoryview, change: Callable[[Path], None]
) -> None:
    os.utime(shard.path, ns=(0, 0))  # what is written next certainly has another time
    reader = FileReader([shard])
    reader.read(0, 0, view, BLOCK)
    change(shard.path)
    with pytest.raises(ReadError, match="changed while it was in use; load the model again"):
        for _ in range(CHECK_EVERY):
            reader.read(0, 0, view, BLOCK)
    with pytest.raises(ReadError, match="changed"):  # and no read after it is believed
        reader.read(0, 0, view, BLOCK)
    reader.close()


def test_a_deleted_file_goes_on_being_read(shard: Shard, view: memoryview) -> None:
    reader = FileReader([shard])
    reader.read(0, 0, view, BLOCK)
    shard.path.unlink()
    for _ in range(2 * CHECK_EVERY):
        assert reader.read(0, 0, view, BLOCK) >= BLOCK
    reader.close()


def test_a_file_changed_since_its_directory_was_read_is_refused(shard: Shard) -> None:
    os.truncate(shard.path, 3 * BLOCK)
    with pytest.raises(ModelError, match="changed while the model was loaded"):
        FileReader([shard])


@pytest.mark.parametrize("first_lie", [0.75, 0.99, 0.3])
def test_direct_reads_that_lie_in_a_part_of_the_file_are_not_used(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, first_lie: float
) -> None:
    """From `first_lie` of the file on, O_DIRECT gives zeros."""
    honest, start = os.preadv, int(first_lie * shard.size)

    def lying(descriptor: int, views: list[memoryview], offset: int) -> int:
        count = honest(descriptor, views, offset)
        if offset >= start // BLOCK * BLOCK:
            views[0][:count] = bytes(count)
        return count

    monkeypatch.setattr(os, "preadv", lying)
    reader = FileReader([shard])
    assert not reader.direct
    assert "reads differently through O_DIRECT" in reader.fallback


def test_every_shard_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = []
    for index in range(20):
        path = tmp_path / f"{index}"
        path.write_bytes(random.Random(index).randbytes(3 * BLOCK + 17))
        shards.append(Shard(path, 3 * BLOCK + 17))
    compared: list[int] = []
    same = reader_module._same
    monkeypatch.setattr(reader_module, "_same", lambda *a: (compared.append(a[2]), same(*a))[1])
    assert FileReader(shards).direct
    assert compared.count(0) == compared.count(3 * BLOCK) == 20  # both ends


@pytest.mark.parametrize("kind", ["demand", "committed", "speculative"])
@pytest.mark.parametrize("count", [-1, 0, BLOCK, 2 * BLOCK - 1, 3 * BLOCK + 1])
def test_a_count_that_does_not_fit_is_refused(shard: Shard, kind: str, count: int) -> None:
    class Lying:
        def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
            return count

        def close(self) -> None: ...

    arena = Arena([shard])
    tensor = ExpertTensor("blk.3.ffn_up_exps.weight", 3, "up", "F32", 2, 0, 0, 2 * BLOCK, 2 * BLOCK)
    slots = Slots([tensor])
    (pool,) = slots.share_out([[3]])
    lanes = Lanes(1, Lying(), slots)
    ticket = Ticket(1)
    lanes.submit([Read(slots.places[3][0], 0, pool, 0, ticket, kind)], kind)
    with pytest.raises(ReadError, match=rf"layer 3 expert 0 \(up\): .* brought {count};"):
        ticket.wait()
    lanes.close()
    with pytest.raises(ReadError, match=f"brought {count};"):
        read_dense([TensorInfo("t", "F32", (8,), 0, 0, 2 * BLOCK)], arena, Lying())


def test_threads_that_cannot_be_started_are_one_line(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in ("lane-1", "dense_0"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reader, arena = FileReader([shard]), Arena([shard])
    before = threading.active_count()
    with pytest.raises(SettingsError, match=r"thread for lane 2 of 3: .*ulimit -u"):
        Lanes(3, reader, Slots([]))
    assert threading.active_count() == before  # the first one has ended
    with pytest.raises(SettingsError, match=r"dense weights: .*ulimit -u"):
        read_dense([TensorInfo("t", "F32", (8,), 0, 0, 32)], arena, reader)


OPEN_ALL = """
import mmap, os, resource, sys
from routeahead.errors import ModelError
from routeahead.experts.layout import Shard
from routeahead.experts.reader import FileReader
paths = sys.argv[3:]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
reader = FileReader([Shard(p, os.path.getsize(p)) for p in paths])
others = [os.open(p, os.O_RDONLY) for p in paths]  # as llama.cpp holds them while it loads
[os.close(descriptor) for descriptor in others]
view = memoryview(mmap.mmap(-1, 4096))
try:
    print(sum(reader.read(i, 0, view, 1) > 0 for i in range(len(paths))))
except ModelError as error:
    print(error)
"""


def _open_all(folder: Path, soft: int, hard: int, script: str = OPEN_ALL) -> str:
    paths = [folder / f"{index}.gguf" for index in range(100)]
    for path in paths:
        path.write_bytes(bytes(100))
    done = subprocess.run(
        [sys.executable, "-c", script, str(soft), str(hard), *paths],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_descriptor_a_shard(tmp_path: Path) -> None:
    assert _open_all(tmp_path, 120, 120) == "100"


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 300, reason="the hard limit is too low"
)
def test_a_soft_limit_is_raised(tmp_path: Path) -> None:
    assert _open_all(tmp_path, 50, 300) == "100"


def test_too_few_descriptors_name_the_limit(tmp_path: Path) -> None:
    without_others = OPEN_ALL.replace("others = [", "others = [] and [")
    assert "ulimit -n 100" in _open_all(tmp_path, 50, 50, without_others)
