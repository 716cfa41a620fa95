"""A GGUF file taken apart, to be put together again wrong. Independent of the package's parser."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Key:
    """A key and its value; `element` is the type of an array's elements."""

    name: bytes
    kind: int
    value: Any
    element: int = 0


@dataclass(frozen=True)
class Tensor:
    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Parts:
    """Counts are written as they are where given, and counted where None."""

    keys: Sequence[Key] = field(repr=False)
    tensors: Sequence[Tensor] = field(repr=False)
    data: bytes = field(repr=False)
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    n_keys: int | None = None
    n_tensors: int | None = None

    def write(self, path: Path) -> Path:
        header = self.header()
        path.write_bytes(header + bytes(-len(header) % self.alignment) + self.data)
        return path

    def header(self) -> bytes:
        counts = (
            len(self.tensors) if self.n_tensors is None else self.n_tensors,
            len(self.keys) if self.n_keys is None else self.n_keys,
        )
        return b"".join(
            [
                self.magic,
                struct.pack("<I2Q", self.version, *counts),
                *(_text(k.name) + struct.pack("<I", k.kind) + _value(k) for k in self.keys),
                *(_tensor(t) for t in self.tensors),
            ]
        )

    def change(self, name: str, value: Any, kind: int | None = None, element: int = 4) -> Parts:
        """With another value of the key `name`, which is added if it is not there."""
        key = name.encode()
        if kind is None:
            kind = next((k.kind for k in self.keys if k.name == key), 4)
        changed = Key(key, kind, value, element)
        if any(k.name == key for k in self.keys):
            return replace(self, keys=[changed if k.name == key else k for k in self.keys])
        return replace(self, keys=[*self.keys, changed])

    def without(self, name: str) -> Parts:
        return replace(self, keys=[k for k in self.keys if k.name != name.encode()])

    def value(self, name: str) -> Any:
        return next(k.value for k in self.keys if k.name == name.encode())


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _value(key: Key) -> bytes:
    if key.kind == ARRAY:
        head = struct.pack("<IQ", key.element, len(key.value))
        return head + b"".join(_scalar(key.element, v) for v in key.value)
    return _scalar(key.kind, key.value)


def _scalar(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    return struct.pack("<" + SCALARS[kind], value) if kind in SCALARS else bytes(8)


def _tensor(tensor: Tensor) -> bytes:
    dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return _text(tensor.name) + dims + struct.pack("<IQ", tensor.kind, tensor.offset)


def take_apart(path: Path) -> Parts:
    data, at = path.read_bytes(), 0

    def number(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize(form)
        return value

    def text() -> bytes:
        nonlocal at
        length = number("Q")
        at += length
        return data[at - length : at]

    def scalar(kind: int) -> Any:
        return text() if kind == STRING else number(SCALARS[kind])

    def key() -> Key:
        name, kind = text(), number("I")
        if kind != ARRAY:
            return Key(name, kind, scalar(kind))
        element, count = number("I"), number("Q")
        return Key(name, kind, [scalar(element) for _ in range(count)], element)

    def tensor() -> Tensor:
        name, dims = text(), number("I")
        return Tensor(name, tuple(number("Q") for _ in range(dims)), number("I"), number("Q"))

    magic, version, n_tensors, n_keys = (
        data[:4],
        (at := 4, number("I"))[1],
        number("Q"),
        number("Q"),
    )
    keys = [key() for _ in range(n_keys)]
    tensors = [tensor() for _ in range(n_tensors)]
    return Parts(keys, tensors, data[-(-at // 32) * 32 :], version, magic)
