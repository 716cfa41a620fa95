"""Writes a model anew with each expert's projections side by side (`experts.packed` says how).

Every byte of a weight is that of the original, and so is the metadata, but for what says how the
file is laid out. A split model becomes one file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from routeahead.engine.fingerprint import fingerprint
from routeahead.errors import ModelError, ReadError, SettingsError
from routeahead.experts.layout import (
    AT_ONCE,
    BLOCK,
    MIB,
    ExpertTensor,
    ModelLayout,
    TensorInfo,
    ceil_block,
    is_one_of_several,
)
from routeahead.experts.packed import ARCHITECTURE, FINGERPRINT, NAMED, NOW, VERSION, WAS
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.llamacpp.gguf_metadata import MAGIC, read_header
from routeahead.telemetry.output_files import check_apart, not_written

_GGUF_VERSION, _U32, _STRING = 3, 4, 8
_ALIGNMENT = "general.alignment"
_OURS = {ARCHITECTURE, _ALIGNMENT, VERSION, WAS, FINGERPRINT}  # keys that are not copied
_PIECE = 32 << 20  # bytes read and written at a time
_SPARE = 64 << 20  # bytes of the disk that stay free

Bytes = npt.NDArray[np.uint8]
Region = Sequence[ExpertTensor]


@dataclass(frozen=True)
class _Plan:
    """What is written, one behind the other.

    Attributes:
        header: up to the first tensor.
        parts: dense tensors and layers' experts.
        nbytes: of the whole file.
    """

    header: bytes
    parts: Sequence[TensorInfo | Region]
    nbytes: int


def write_packed(
    source: Path, target: Path, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Packs the model `source` into the file `target`, which is there when all of it is written.

    A process that is killed leaves what it had written as `target` with ".partial" behind its name,
    which the next one overwrites.

    Args:
        progress: called with (bytes done, bytes in all).

    Raises:
        ModelError: the model cannot be used, is packed, has no experts, or only such that a packed
            file is not faster.
        ReadError: a file of it cannot be read.
        SettingsError: the target exists or cannot be written, or the disk has no room.
    """
    layout = read_layout(source)
    if layout.packed:
        raise ModelError(f"{source}: is packed already")
    if not layout.experts:
        raise ModelError(f"{source}: has no experts ({layout.arch}): nothing to pack")
    smallest = min(layout.bytes_by_layer().values())
    if smallest > AT_ONCE:
        raise ModelError(
            f"{source}: an expert has {smallest >> 10:,} KiB, and above {AT_ONCE >> 10} one read "
            "of all of it is slower than one for each projection: nothing to pack"
        )
    check_apart([("a file of the model", shard.path) for shard in layout.shards], [target])
    if is_one_of_several(target):
        raise SettingsError(
            f"{target}: is the name of a part of a split model, and one file is written: give "
            "another name"
        )
    _check_absent(target)
    plan = _plan(layout)
    with _written(target) as output:
        _check_room(target, plan.nbytes)
        output.write(plan.header)
        done = len(plan.header)
        for piece in _weights(layout, plan.parts):
            output.write(piece)
            done += len(piece)
            if progress:
                progress(done, plan.nbytes)


def _check_absent(target: Path) -> None:
    if os.path.lexists(target):
        raise SettingsError(f"{target}: exists: give another name, or delete it first")


def _check_room(target: Path, nbytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if nbytes + _SPARE > free:
        raise SettingsError(
            f"{target}: {nbytes // MIB:,} MiB are to be written, {_SPARE // MIB} more stay free, "
            f"and {free // MIB:,} are free: make room, or write to another disk"
        )


def _plan(layout: ModelLayout) -> _Plan:
    """The header, with every tensor behind the one before it."""
    regions: dict[int, list[ExpertTensor]] = {}
    for expert in layout.experts:
        regions.setdefault(expert.layer, []).append(expert)
    layer_of = {expert.name: expert.layer for expert in layout.experts}
    by_name = {tensor.name: tensor for tensor in layout.tensors}
    parts, ordered = list[TensorInfo | Region](), list[TensorInfo]()
    for tensor in layout.tensors:  # a layer's experts stand where the first of them stood
        if tensor.name not in layer_of:
            parts.append(tensor)
            ordered.append(tensor)
        elif layer_of[tensor.name] in regions:
            region = regions.pop(layer_of[tensor.name])
            parts.append(region)
            ordered += [by_name[expert.name] for expert in region]
    keys, entries = _keys(layout), _entries(layout)
    directory, offset = bytearray(), 0
    for tensor in ordered:
        directory += entries[tensor.name] + struct.pack("<Q", offset)
        offset += ceil_block(tensor.nbytes)
    counts = struct.pack("<IQQ", _GGUF_VERSION, len(ordered), len(keys))
    header = b"".join([MAGIC, counts, *keys, directory])
    header = header.ljust(ceil_block(len(header)), b"\0")
    return _Plan(header, parts, len(header) + offset)


def _keys(layout: ModelLayout) -> list[bytes]:
    """The first file's metadata, but for what says how the files are laid out."""
    found = read_header(layout.shards[0].path).keys
    kept = [
        value for key, value in found.items() if key not in _OURS and not key.startswith("split.")
    ]
    return [
        _text_key(ARCHITECTURE, NAMED + layout.arch),
        *kept,
        _number_key(_ALIGNMENT, BLOCK),
        _number_key(VERSION, NOW),
        _text_key(WAS, layout.arch),
        _text_key(FINGERPRINT, fingerprint(layout.loaded())),
    ]


def _entries(layout: ModelLayout) -> dict[str, bytes]:
    """What the directories of all files say of each tensor, without its offset."""
    found: dict[str, bytes] = {}
    for shard in layout.shards:
        found |= read_header(shard.path).tensors
    return found


def _text_key(key: str, value: str) -> bytes:
    return _text(key) + struct.pack("<I", _STRING) + _text(value)


def _number_key(key: str, value: int) -> bytes:
    return _text(key) + struct.pack("<II", _U32, value)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _weights(layout: ModelLayout, parts: Sequence[TensorInfo | Region]) -> Iterator[Any]:
    """The bytes of all parts, each with what its tensors are rounded up by."""
    with contextlib.ExitStack() as stack:
        files = [_File(shard.path, stack) for shard in layout.shards]
        for part in parts:
            if isinstance(part, TensorInfo):
                end = part.offset + part.nbytes
                for start in range(part.offset, end, _PIECE):
                    yield files[part.shard].read(start, min(_PIECE, end - start)).data
                yield bytes(ceil_block(part.nbytes) - part.nbytes)
            else:
                yield from _experts(files, part)
        for file in files:
            file.check_unchanged()


def _experts(files: Sequence[_File], region: Region) -> Iterator[Any]:
    """One expert behind the other, as many at a time as make a large read of each tensor."""
    stride, count = sum(t.expert_bytes for t in region), region[0].n_expert
    each = max(1, _PIECE // stride)
    for first in range(0, count, each):
        experts, at = min(each, count - first), 0
        piece = np.empty((experts, stride), np.uint8)
        for tensor in region:
            nbytes = tensor.expert_bytes
            start, _ = tensor.slice_of(first)
            read = files[tensor.shard].read(start, experts * nbytes)
            piece[:, at : at + nbytes] = read.reshape(experts, nbytes)
            at += nbytes
        yield piece.reshape(-1).data
    yield bytes(sum(ceil_block(count * t.expert_bytes) for t in region) - count * stride)


class _File:
    """A file of the model that is packed."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self._path = path
        with self._told():
            self._file = stack.enter_context(path.open("rb", buffering=0))
            self._before = self._state()

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def check_unchanged(self) -> None:
        """
        Raises:
            ReadError: it was written to meanwhile, so that what was read may be a mixture.
        """
        if self._state() != self._before:
            raise ReadError(f"{self._path}: changed while it was read; pack it again")

    def read(self, start: int, nbytes: int) -> Bytes:
        """
        Raises:
            ReadError: the file ends earlier, or the disk failed.
        """
        found, got = np.empty(nbytes, np.uint8), 0
        with self._told():
            while got < nbytes:
                count = os.preadv(self._file.fileno(), [found.data[got:]], start + got)
                if not count:
                    raise ReadError(f"{self._path}: ends {nbytes - got} bytes early")
                got += count
        return found

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ReadError(f"{self._path}: cannot read it: {error.strerror}") from None


@contextlib.contextmanager
def _written(target: Path) -> Iterator[IO[bytes]]:
    """A file that becomes `target` when it is complete; on any error nothing is left of it.

    Raises:
        SettingsError: it cannot be written, or another process writes it.
    """
    part = target.with_name(f"{target.name}.partial")
    try:
        # Without O_NONBLOCK, a FIFO of that name would be waited for.
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        with open(descriptor, "wb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SettingsError(f"{part}: is no regular file: delete it")
            _lock(file, part)
            try:
                _check_absent(target)
                file.truncate()
                yield file
                file.flush()
                os.fsync(descriptor)
                _check_absent(target)
                part.replace(target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise not_written(part if error.filename else target, error) from None


def _lock(file: IO[bytes], part: Path) -> None:
    """Makes the file this process's; who had it may have given it its name, or deleted it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.path.samestat(os.fstat(file.fileno()), part.lstat())
    except (BlockingIOError, FileNotFoundError):
        mine = False
    if not mine:
        raise SettingsError(f"{part}: another process writes it; wait until it is done")
