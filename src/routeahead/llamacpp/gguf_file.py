"""Reads the directory of a GGUF file: its own walk over the keys, ggml's parser for the tensors.

What is wrong with a file is said here, with one line, before llama.cpp reads it: `gguf_metadata`
and `gguf_check` refuse what would end the process there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from routeahead.errors import ModelError
from routeahead.experts.layout import (
    ModelLayout,
    Shard,
    TensorInfo,
    check_extent,
    shard_paths,
)
from routeahead.experts.packed import is_packed, packed_tensors, unpacked_metadata
from routeahead.llamacpp import ggml, native_log
from routeahead.llamacpp.gguf_check import check_model
from routeahead.llamacpp.gguf_metadata import Value, read_metadata


def read_layout(path: str | os.PathLike[str]) -> ModelLayout:
    """Reads the directory of a model, of all its shards.

    Raises:
        ModelError: missing, unreadable, not a GGUF, malformed, truncated, contradictory, or a shard
            is absent.
    """
    first = Path(path)
    _check_readable(first)
    shards: list[Shard] = []
    tensors: list[TensorInfo] = []
    metadata: dict[str, Value] = {}
    paths = shard_paths(first)
    for index, shard_path in enumerate(paths):
        _check_readable(shard_path)
        values = _read_metadata(shard_path)
        _check_place(shard_path, values, index, len(paths))
        tensors += _read_tensors(shard_path, index)
        shards.append(Shard(shard_path, shard_path.stat().st_size))
        metadata = values if index == 0 else metadata
    if is_packed(metadata):
        metadata = unpacked_metadata(first, metadata)
        tensors = packed_tensors(first, tensors)
    check_extent(shards, tensors)
    layout = ModelLayout(shards, tensors, metadata)
    check_model(first, layout)
    return layout


def header_bytes(path: Path) -> int:
    """Bytes before the weights, of a file that may end behind them.

    Raises:
        ModelError: it ends before, or is no GGUF.
    """
    read_metadata(path)
    base = ggml.library()
    with _parsed(path) as context:
        return int(base.gguf_get_data_offset(context))


def _check_readable(path: Path) -> None:
    try:
        if path.is_dir():
            raise ModelError(f"{path}: is a folder; give the GGUF file in it")
        if path.exists() and not path.is_file():
            raise ModelError(f"{path}: is no regular file; give a GGUF file on a disk")
        with path.open("rb"):
            pass
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path}: {error.strerror or error}; give a readable GGUF file")


def _check_place(path: Path, metadata: dict[str, Value], index: int, count: int) -> None:
    """A file's name and its header must say the same of its place in a set."""
    number, declared = metadata.get("split.no", 0), metadata.get("split.count") or 1
    if declared != count:
        raise ModelError(
            f"{path}: says that it is one of {declared} shards but is named like one of {count}; "
            "keep the names -00001-of-000NN.gguf"
        )
    if count > 1 and number != index:
        raise ModelError(
            f"{path}: says that it is shard {number} (from 0) and is named like shard {index}; "
            "keep the names -00001-of-000NN.gguf"
        )


def _read_metadata(path: Path) -> dict[str, Value]:
    try:
        return read_metadata(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _read_tensors(path: Path, shard: int) -> list[TensorInfo]:
    base = ggml.library()
    with _parsed(path) as context:
        start = base.gguf_get_data_offset(context)
        count = base.gguf_get_n_tensors(context)
        return [_tensor(context, index, shard, start) for index in range(count)]


@contextlib.contextmanager
def _parsed(path: Path) -> Iterator[int]:
    """What ggml's parser makes of a file."""
    base = ggml.library()
    with native_log.errors() as reasons:
        context = base.gguf_init_from_file(os.fsencode(path), ggml.GgufInitParams(True, None))
    if not context:
        reason = f" ({reasons[0]})" if reasons else ""
        raise ModelError(
            f"{path}: truncated or malformed list of tensors{reason}; download it again"
        )
    try:
        yield context
    finally:
        base.gguf_free(context)


def _tensor(context: int, index: int, shard: int, data_start: int) -> TensorInfo:
    base = ggml.library()
    dims = base.gguf_get_tensor_ne(context, index)[: ggml.MAX_DIMS]
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    return TensorInfo(
        name=base.gguf_get_tensor_name(context, index).decode(errors="replace"),
        quant=ggml.type_name(base.gguf_get_tensor_type(context, index)),
        shape=tuple(dims),
        shard=shard,
        offset=data_start + base.gguf_get_tensor_offset(context, index),
        nbytes=base.gguf_get_tensor_size(context, index),
    )
