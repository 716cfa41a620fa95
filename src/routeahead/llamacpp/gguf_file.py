"""Reads the directory of a GGUF file with ggml's own parser.

The same parser reads the file again when llama.cpp loads it. What it refuses is refused here
first, with a one-line error, and a file that it accepts does not abort the process there.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from routeahead.errors import ModelError
from routeahead.experts.layout import (
    ModelLayout,
    Shard,
    TensorInfo,
    check_extent,
    shard_paths,
)
from routeahead.llamacpp import ggml, native_log

MAGIC = b"GGUF"
_MAX_BLOCKS = 512  # llama.cpp's LLAMA_MAX_LAYERS

# gguf_type → the accessor of a scalar of that type.
_SCALARS = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32",
    7: "bool", 8: "str", 10: "u64", 11: "i64", 12: "f64",
}  # fmt: skip
_ARRAY = 9
_NUMBERS = {  # the element type of an array → how NumPy calls it
    0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8",
    12: "f8",
}  # fmt: skip


def read_layout(path: str | os.PathLike[str]) -> ModelLayout:
    """Reads the directory of a model, of all its shards.

    Raises:
        ModelError: the file is missing, unreadable, no GGUF, malformed or truncated, or a shard is
            absent.
    """
    first = Path(path)
    _check_readable(first)
    shards: list[Shard] = []
    tensors: list[TensorInfo] = []
    metadata: dict[str, Any] = {}
    for index, shard_path in enumerate(shard_paths(first)):
        _check_readable(shard_path)
        values, listed = _read_shard(shard_path, index)
        shards.append(Shard(shard_path, shard_path.stat().st_size))
        tensors += listed
        metadata = values if index == 0 else metadata
    _check_split_count(first, metadata, len(shards))
    check_extent(shards, tensors)
    layout = ModelLayout(shards, tensors, metadata)
    if layout.experts:
        _check_counts(first, layout)
    return layout


def _check_counts(path: Path, layout: ModelLayout) -> None:
    """Checks counts that llama.cpp asserts: a failed assertion would end the process.

    Of counts that are lists, one for each layer, only those that streaming uses are checked.
    """
    used, count, blocks = map(layout.value, ("expert_used_count", "expert_count", "block_count"))
    last = layout.moe_layers[-1]
    checks = [
        ("expert_count", count, count is None or count == layout.n_expert),
        ("expert_used_count", used, used is None or _routes(used, layout)),
        ("block_count", blocks, blocks is None or blocks in range(last + 1, _MAX_BLOCKS + 1)),
    ]
    for key, value, right in checks:
        if not right:
            raise ModelError(
                f"{path}: {layout.arch}.{key} is {value}, which does not fit its tensors "
                f"({layout.n_expert} experts, last expert layer {last}); download it again"
            )


def _routes(used: Any, layout: ModelLayout) -> bool:
    """Whether every layer with experts uses some of them."""
    if isinstance(used, list) and len(used) <= layout.moe_layers[-1]:
        return False
    return all(layout.top_k(n) in range(1, layout.n_expert + 1) for n in layout.moe_layers)


def _check_readable(path: Path) -> None:
    try:
        if path.is_dir():
            raise ModelError(f"{path}: is a folder; give the GGUF file in it")
        if path.exists() and not path.is_file():
            raise ModelError(f"{path}: is no regular file; give a GGUF file on a disk")
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}; give a readable GGUF file") from None
    if magic != MAGIC:
        raise ModelError(f"{path}: not a GGUF file (it starts with {magic!r}, not {MAGIC!r})")


def _check_split_count(path: Path, metadata: dict[str, Any], found: int) -> None:
    declared = int(metadata.get("split.count", 0) or 1)
    if declared != found:
        raise ModelError(
            f"{path}: says that it is one of {declared} shards but is named like one of {found}; "
            "keep the names -00001-of-000NN.gguf"
        )


def _read_shard(path: Path, shard: int) -> tuple[dict[str, Any], list[TensorInfo]]:
    base = ggml.library()
    with native_log.errors() as reasons:
        context = base.gguf_init_from_file(os.fsencode(path), ggml.GgufInitParams(True, None))
    if not context:
        reason = f" ({reasons[-1]})" if reasons else ""
        raise ModelError(f"{path}: malformed or truncated GGUF header{reason}; download it again")
    try:
        metadata: dict[str, Any] = {}
        for key in range(base.gguf_get_n_kv(context)):
            kind = base.gguf_get_kv_type(context, key)
            accessor = _SCALARS.get(kind)
            name = base.gguf_get_key(context, key).decode(errors="replace")
            if kind == _ARRAY:
                numbers = _numbers(context, key)
                metadata |= {} if numbers is None else {name: numbers}
            if accessor:
                value = getattr(base, f"gguf_get_val_{accessor}")(context, key)
                metadata[name] = value.decode(errors="replace") if accessor == "str" else value
        start = base.gguf_get_data_offset(context)
        count = base.gguf_get_n_tensors(context)
        return metadata, [_tensor(context, index, shard, start) for index in range(count)]
    finally:
        base.gguf_free(context)


def _numbers(context: int, key: int) -> list[Any] | None:
    """An array of numbers, one for each layer; None for a longer one, and for texts."""
    base = ggml.library()
    form, count = _NUMBERS.get(base.gguf_get_arr_type(context, key)), 0
    if form:
        count = base.gguf_get_arr_n(context, key)
    if not form or count > _MAX_BLOCKS:
        return None
    dtype = np.dtype(form)
    data = ctypes.string_at(base.gguf_get_arr_data(context, key), count * dtype.itemsize)
    numbers: list[Any] = np.frombuffer(data, dtype).tolist()
    return numbers


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
