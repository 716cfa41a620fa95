"""Walks the keys of a GGUF file without believing any of its lengths.

ggml's parser reserves what a file says before it has read it, and reports the last thing that went
wrong. Here each length is compared with what is left of the file first, and the first thing that
is wrong is said. Long arrays are counted and not kept: a vocabulary is as large as the header.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from routeahead.errors import ModelError

MAGIC = b"GGUF"
TOKENS = "tokenizer.ggml.tokens"

HEADER_LIMIT = 256 << 20
"""Bytes. Headers of real models have up to 30 MiB; a length beyond this is damage."""

_KEPT = 1024  # elements of an array of numbers that is kept: one a layer
_CHUNK = 1 << 16  # bytes read from the file at a time

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f",
    7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_LEAST_KEY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes that each takes in the header


@dataclass(frozen=True)
class Counted:
    """An array that is not kept: text, or more numbers than a model has layers."""

    count: int


@dataclass(frozen=True)
class Vocabulary(Counted):
    """The array of tokens, by what is asked of it.

    Attributes:
        hashes: int64 (count,), Python's hash of each token's bytes.
    """

    hashes: array[int]

    def repeated(self) -> int | None:
        """Index of a token that equals an earlier one; None if all differ. Empty ones do not
        count: llama.cpp gives each a name of its own."""
        values = np.frombuffer(self.hashes, np.int64)
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        same = np.flatnonzero((np.diff(ordered) == 0) & (ordered[1:] != hash(b"")))
        return int(order[same[0] + 1]) if len(same) else None

    def lacks(self, tokens: list[bytes]) -> list[bytes]:
        """Those of `tokens` that are not in it."""
        present = np.isin([hash(token) for token in tokens], np.frombuffer(self.hashes, np.int64))
        return [token for token, there in zip(tokens, present, strict=True) if not there]


Value = int | float | bool | str | list[Any] | Counted


@dataclass(frozen=True)
class Header:
    """A file's header, to be written again.

    Attributes:
        keys: each with the bytes that it takes: its name, its type and its value.
        tensors: names in the order of the file, each with the bytes that it takes in the directory
            but for the last 8, which are its offset.
    """

    keys: dict[str, bytes]
    tensors: dict[str, bytes]


def read_metadata(path: Path) -> dict[str, Value]:
    """The file's keys and values. Lists are arrays of at most `_KEPT` numbers.

    Raises:
        ModelError: the header is no GGUF's of this machine, malformed, or longer than the file.
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        return _Walk(path, file, path.stat().st_size).metadata()


def read_header(path: Path) -> Header:
    """What the header is made of.

    Raises:
        ModelError, OSError: as `read_metadata`.
    """
    with path.open("rb", buffering=0) as file:
        return _Walk(path, file, path.stat().st_size).header()


class _Walk:
    """A position in the header; `data` holds what was read of the file so far."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file = path, file
        self._size = min(size, HEADER_LIMIT)
        self._limited = size > HEADER_LIMIT
        self._data = bytearray()
        self._at = 0

    def metadata(self) -> dict[str, Value]:
        return {key: value for key, value, _ in self._keys(self._counts()[1])}

    def header(self) -> Header:
        tensors, keys = self._counts()
        spans = {key: bytes(self._data[start : self._at]) for key, _, start in self._keys(keys)}
        return Header(spans, dict(self._tensor(tensors) for _ in range(tensors)))

    def _counts(self) -> tuple[int, int]:
        """Of tensors and of keys."""
        self._check_version()
        tensors, keys = (self._number(_U64, "its counts") for _ in range(2))
        room = self._size - self._at
        if keys * _LEAST_KEY + tensors * _LEAST_TENSOR > room:
            raise self._error(f"counts {keys} keys and {tensors} tensors in {room} bytes")
        return tensors, keys

    def _keys(self, count: int) -> Iterator[tuple[str, Value, int]]:
        """(key, value, where the key begins)."""
        known = set[str]()
        for index in range(count):
            start = self._at
            key = self._name(f"key {index + 1} of {count}")
            if key in known:
                raise self._error(f"has the key {key} twice")
            known.add(key)
            yield key, self._value(key), start

    def _tensor(self, count: int) -> tuple[str, bytes]:
        """A tensor's name, and what is in the directory before its offset."""
        what, start = f"the list of {count} tensors", self._at
        name = self._bytes(self._length(what), what).decode(errors="replace")
        dimensions = self._number(_U32, what)
        self._bytes(dimensions * _U64.size + _U32.size, what)  # and the type
        entry = bytes(self._data[start : self._at])
        self._number(_U64, what)
        return name, entry

    def _check_version(self) -> None:
        magic = self._bytes(4, "its first bytes")
        if magic != MAGIC:
            raise ModelError(
                f"{self._path}: not a GGUF file (it starts with {magic!r}, not {MAGIC!r})"
            )
        version = self._number(_U32, "its version")
        if version & 0xFFFF == 0:
            raise ModelError(
                f"{self._path}: written for big-endian machines (or damaged); "
                "download or convert the little-endian file"
            )
        if version == 1:
            raise ModelError(
                f"{self._path}: GGUF version 1, which llama.cpp reads no longer; convert it again"
            )
        if version > 3:
            raise ModelError(f"{self._path}: GGUF version {version}; versions 2 and 3 can be read")

    def _value(self, key: str) -> Value:
        kind = self._number(_U32, f"the type of {key}")
        if kind == _STRING:
            return self._bytes(self._length(key), key).decode(errors="replace")
        if kind != _ARRAY:
            return self._scalar(kind, key)
        kind = self._number(_U32, f"the type of {key}")
        count = self._number(_U64, f"the length of {key}")
        if kind == _STRING:
            return self._texts(key, count)
        form = self._form(kind, key)
        size = struct.calcsize(form)
        if count > (self._size - self._at) // size:
            raise self._error(f"says that {key} has {count} elements")
        if count > _KEPT:
            self._fill(self._at + count * size, key)
            self._at += count * size
            return Counted(count)
        data = self._bytes(count * size, key)
        return list(struct.unpack(f"<{count}{form[1]}", data))

    def _scalar(self, kind: int, key: str) -> Value:
        form = self._form(kind, key)
        value: Value = struct.unpack(form, self._bytes(struct.calcsize(form), key))[0]
        return value

    def _form(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self._error(f"gives {key} the unknown type {kind}")
        return _SCALARS[kind]

    def _texts(self, key: str, count: int) -> Counted:
        if count > (self._size - self._at) // _U64.size:
            raise self._error(f"says that {key} has {count} elements")
        if key == TOKENS:
            return self._vocabulary(key, count)
        # Hundreds of thousands: nothing but the next length is looked at.
        data, at, unpack, left = self._data, self._at, _U64.unpack_from, count
        while left:
            try:
                while left:
                    at += 8 + unpack(data, at)[0]
                    left -= 1
            except (struct.error, OverflowError):  # no further than this has been read
                self._fill(at + 8, key)
        self._fill(at, key)
        self._at = at
        return Counted(count)

    def _vocabulary(self, key: str, count: int) -> Vocabulary:
        data, at, unpack = self._data, self._at, _U64.unpack_from
        hashes = array("q")  # grows with what is there, and not with what `count` says
        for _ in range(count):
            if at + 8 > len(data):
                self._fill(at + 8, key)
            end = at + 8 + unpack(data, at)[0]
            if end > len(data):
                self._fill(end, key)
            hashes.append(hash(bytes(data[at + 8 : end])))
            at = end
        self._at = at
        return Vocabulary(count, hashes)

    def _name(self, what: str) -> str:
        data = self._bytes(self._length(what), what)
        name = data.decode(errors="replace")
        if not name.isprintable() or not name or name.encode() != data:
            raise self._error(f"gives {what} the name {data[:80]!r}")
        return name

    def _length(self, what: str) -> int:
        return self._number(_U64, f"the length of {what}")

    def _number(self, form: struct.Struct, what: str) -> int:
        value: int = form.unpack(self._bytes(form.size, what))[0]
        return value

    def _bytes(self, count: int, what: str) -> bytes:
        end = self._at + count
        if end > len(self._data):
            self._fill(end, what)
        piece = bytes(self._data[self._at : end])
        self._at = end
        return piece

    def _fill(self, end: int, what: str) -> None:
        """Reads on until `end` bytes are here."""
        if end > self._size:
            raise self._error(
                f"ends inside {what}"
                if not self._limited
                else f"says that {what} ends at byte {end}"
            )
        while len(self._data) < end:
            piece = self._file.read(max(_CHUNK, end - len(self._data)))
            if not piece:
                raise self._error(f"ends inside {what}")
            self._data += piece

    def _error(self, what: str) -> ModelError:
        return ModelError(
            f"{self._path}: malformed or truncated: its header {what}; download it again"
        )
