"""Hashes of every expert and every dense weight, written once and compared with what is read.

A disk or a cable that changes bits, or a file that changes while its size and times do not, gives
text that is only a little worse. `write_checksums` reads a model once and writes a file beside it;
`Verified` compares each slice with it before a lane hands the slice over.

The hash is XXH3 (64 bits): it finds damage, not malice, and takes a hundredth of a read's time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeahead.errors import ModelError, ReadError, SettingsError
from routeahead.experts.arena import Arena
from routeahead.experts.layout import ModelLayout, Piece, TensorInfo, floor_block, range_of
from routeahead.experts.reader import Reader
from routeahead.telemetry.json_file import write_json

SUFFIX = ".checksums.json"
_FORMAT = "routeahead checksums v1, xxh3_64"
_DIGITS = 16
_PIECE = 8 << 20  # bytes hashed at a time


@dataclass(frozen=True)
class Checksums:
    """Hashes in hexadecimal.

    Attributes:
        experts: name of an expert tensor → one hash an expert.
        dense: name of any other tensor → its hash.
    """

    experts: dict[str, list[str]]
    dense: dict[str, str]


def checksums_path(layout: ModelLayout) -> Path:
    """Where a model's hashes are: beside its first file."""
    first = layout.shards[0].path
    return first.with_name(first.name + SUFFIX)


def write_checksums(
    layout: ModelLayout, *, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Reads the whole model and writes its hashes beside it; returns where.

    Args:
        progress: called with (bytes done, bytes in all).

    Raises:
        ReadError: the model cannot be read.
        SettingsError: the file cannot be written, or xxhash is not installed.
    """
    pieces = _ranges(layout)
    total, done = sum(end - start for *_, start, end in pieces), 0
    hashes: dict[str, str] = {}
    for name, shard, start, end in pieces:
        hashes[name] = hashes.get(name, "") + _hash_of_file(layout.shards[shard].path, start, end)
        done += end - start
        if progress:
            progress(done, total)
    path = checksums_path(layout)
    sizes = [shard.size for shard in layout.shards]
    write_json(path, {"format": _FORMAT, "sizes": sizes, "tensors": hashes})
    return path


def _ranges(layout: ModelLayout) -> list[tuple[str, int, int, int]]:
    """(tensor, file, start, end) of what is hashed: each expert of a tensor, any other tensor."""
    slices = [(t.name, t.shard, *t.slice_of(e)) for t in layout.experts for e in range(t.n_expert)]
    dense = [(t.name, t.shard, t.offset, t.offset + t.nbytes) for t in layout.dense]
    return sorted([*slices, *dense], key=lambda piece: piece[1:3])


def read_checksums(layout: ModelLayout) -> Checksums:
    """The hashes that `write_checksums` wrote.

    Raises:
        SettingsError: there are none.
        ModelError: they are not this model's.
    """
    path = checksums_path(layout)
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError("another format")
        if content["sizes"] != [shard.size for shard in layout.shards]:
            raise ValueError("of files of other sizes")
        hashes: dict[str, str] = content["tensors"]
        experts = {t.name: _split(hashes[t.name], t.n_expert) for t in layout.experts}
        dense = {t.name: _split(hashes[t.name], 1)[0] for t in layout.dense}
    except OSError as error:
        raise SettingsError(
            f"{path}: {error.strerror}; write the checksums with `routeahead checksum`"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path}: not the checksums of this model ({error}); write them again"
        ) from None
    return Checksums(experts, dense)


def _split(digits: str, count: int) -> list[str]:
    if len(digits) != count * _DIGITS:
        raise ValueError("of other tensors")
    return [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]


class Verified:
    """Compares each slice of an expert with its hash when it has been read. Lanes use it at once:
    it changes nothing after it was made."""

    def __init__(self, inner: Reader, layout: ModelLayout, sums: Checksums) -> None:
        """
        Raises:
            SettingsError: xxhash is not installed.
        """
        self._inner, self._hash = inner, _hash_function()
        self._shards, self._sums = layout.shards, sums.experts
        self._known: dict[tuple[int, int], tuple[Piece, int]] = {}  # by file and end of a read
        for piece in layout.pieces:
            for expert in range(piece[0].n_expert):
                shard, _, end = range_of(piece, expert)
                self._known[shard, end] = piece, expert

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        got = self._inner.read(shard, offset, view, need)
        known = self._known.get((shard, offset + need))
        if known and got >= need and floor_block(known[0][0].slice_of(known[1])[0]) == offset:
            self._compare(*known, offset, view)
        return got

    def _compare(self, piece: Piece, expert: int, offset: int, view: memoryview) -> None:
        for tensor in piece:
            start, end = tensor.slice_of(expert)
            if self._hash(view[start - offset : end - offset]) != self._sums[tensor.name][expert]:
                what = f"{self._shards[tensor.shard].path}: {tensor.name}, expert {expert}"
                raise ReadError(f"{what}: {_DIFFERS}")

    def close(self) -> None:
        self._inner.close()


_DIFFERS = (
    "its bytes are not those of the checksums; the file, the disk or the memory is damaged: "
    "compare the file with its source"
)


def verify_dense(
    layout: ModelLayout, tensors: Sequence[TensorInfo], arena: Arena, sums: Checksums
) -> None:
    """Compares dense weights, once they are in the arena.

    Raises:
        ReadError: one differs.
        SettingsError: xxhash is not installed.
    """
    digest = _hash_function()
    for tensor in tensors:
        end = tensor.offset + tensor.nbytes
        offset, view = arena.expose(tensor.shard, tensor.offset, end)
        if digest(view[tensor.offset - offset : end - offset]) != sums.dense[tensor.name]:
            raise ReadError(f"{layout.shards[tensor.shard].path}: {tensor.name}: {_DIFFERS}")


def _xxhash() -> Any:
    try:
        import xxhash
    except ImportError:
        raise SettingsError("checksums need xxhash: install routeahead[verify]") from None
    return xxhash


def _hash_function() -> Callable[[memoryview], str]:
    digest: Callable[[memoryview], str] = _xxhash().xxh3_64_hexdigest
    return digest


def _hash_of_file(path: Path, start: int, end: int) -> str:
    digest = _xxhash().xxh3_64()
    for piece in _pieces(path, start, end):
        digest.update(piece)
    text: str = digest.hexdigest()
    return text


def _pieces(path: Path, start: int, end: int) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < end:
                piece = file.read(min(_PIECE, end - start))
                if not piece:
                    raise ReadError(f"{path}: ends {end - start} bytes early")
                start += len(piece)
                yield piece
    except OSError as error:
        raise ReadError(f"{path}: cannot read it: {error.strerror}") from None
