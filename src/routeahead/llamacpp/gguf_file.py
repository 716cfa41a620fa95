"""Reads the directory of a GGUF file with ggml's own parser.

The same parser reads the file again when llama.cpp loads it. What it refuses is refused here
first, with a one-line error, and a file that it accepts does not abort the process there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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

# gguf_type → the accessor of a scalar of that type. Arrays are left out: streaming needs none.
_SCALARS = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32",
    7: "bool", 8: "str", 10: "u64", 11: "i64", 12: "f64",
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

    Counts that are lists, one a layer, are left to llama.cpp.
    """
    used, count, blocks = map(layout.value, ("expert_used_count", "expert_count", "block_count"))
    last = layout.moe_layers[-1]
    checks = [
        ("expert_count", count, count is None or count == layout.n_expert),
        ("expert_used_count", used, used is None or used in range(1, layout.n_expert + 1)),
        ("block_count", blocks, blocks is None or blocks in range(last + 1, _MAX_BLOCKS + 1)),
    ]
    for key, value, right in checks:
        if not right:
            raise ModelError(
                f"{path}: {layout.arch}.{key} is {value}, which does not fit its tensors "
                f"({layout.n_expert} experts, last expert layer {last}); download it again"
            )


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
        metadata = {}
        for key in range(base.gguf_get_n_kv(context)):
            accessor = _SCALARS.get(base.gguf_get_kv_type(context, key))
            if accessor:
                value = getattr(base, f"gguf_get_val_{accessor}")(context, key)
                name = base.gguf_get_key(context, key).decode(errors="replace")
                metadata[name] = value.decode(errors="replace") if accessor == "str" else value
        start = base.gguf_get_data_offset(context)
        count = base.gguf_get_n_tensors(context)
        return metadata, [_tensor(context, index, shard, start) for index in range(count)]
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
