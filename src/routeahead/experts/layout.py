"""The place of every expert in the model's files, from the tensor directory of a GGUF.

No architecture is known by name. A tensor is an expert tensor when llama.cpp's naming says so
(`blk.L.ffn_<projection>_exps.weight`) and its outermost dimension counts the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from routeahead.errors import ModelError

EXPERT_NAME = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight$")

_BLOCK_NAME = re.compile(r"^blk\.(\d+)\.")

MIB = 1 << 20

BLOCK = 4096
"""Bytes. Reads start and end at multiples of it: the page size, a multiple of every disk block."""


def floor_block(offset: int) -> int:
    """Start of the block that byte `offset` lies in."""
    return offset // BLOCK * BLOCK


def ceil_block(offset: int) -> int:
    """`offset`, or the start of the next block if it is inside one."""
    return -(-offset // BLOCK) * BLOCK


@dataclass(frozen=True)
class Shard:
    """One file of the model. `size` in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the file's directory lists it.

    Attributes:
        shape: ggml order, fastest dimension first.
        shard: index of the file that holds it.
        offset: bytes from the start of that file.
        nbytes: length in bytes.
        stride: bytes from one expert's slice to the next, if others lie in between; else 0.
    """

    name: str
    quant: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    stride: int = 0

    @property
    def end(self) -> int:
        """Offset of the byte behind its last one."""
        if not self.stride:
            return self.offset + self.nbytes
        experts = self.shape[2]
        return self.offset + (experts - 1) * self.stride + self.nbytes // experts


@dataclass(frozen=True)
class ExpertTensor:
    """One projection of one layer: `n_expert` slices of `expert_bytes` bytes.

    From one to the next are `stride` bytes: as many, or (`experts.packed`) those of the layer's
    other projections, too.
    """

    name: str
    layer: int
    projection: str
    quant: str
    n_expert: int
    shard: int
    offset: int
    expert_bytes: int
    stride: int

    def slice_of(self, expert: int) -> tuple[int, int]:
        """File range [start, end) of one expert, in bytes."""
        start = self.offset + expert * self.stride
        return start, start + self.expert_bytes

    def follows(self, other: ExpertTensor) -> bool:
        """Whether each expert's slice begins where its slice of `other` ends."""
        return (
            (self.layer, self.shard, self.n_expert) == (other.layer, other.shard, other.n_expert)
            and self.offset == other.offset + other.expert_bytes
            and self.stride == other.stride > other.expert_bytes
        )


Piece = Sequence[ExpertTensor]
"""What one read brings of an expert: its slice of one tensor, or its slices of several, which stand
side by side in the file."""


AT_ONCE = 512 << 10
"""Bytes of an expert up to which one read brings all of it. Of larger ones the first projection
computes while the others are read, which is worth more than fewer reads (docs/performance.md)."""


def pieces(tensors: Iterable[ExpertTensor]) -> list[Piece]:
    """The reads that bring an expert of each layer; `tensors` as `ModelLayout.experts`."""
    found: list[list[ExpertTensor]] = []
    for tensor in tensors:
        if found and tensor.follows(found[-1][-1]) and tensor.stride <= AT_ONCE:
            found[-1].append(tensor)
        else:
            found.append([tensor])
    return [tuple(piece) for piece in found]


def range_of(piece: Piece, expert: int) -> tuple[int, int, int]:
    """(file, start, end) of one expert's bytes."""
    return piece[0].shard, piece[0].slice_of(expert)[0], piece[-1].slice_of(expert)[1]


@dataclass(frozen=True)
class ModelLayout:
    """The model's files, tensors and the metadata that streaming needs."""

    shards: Sequence[Shard]
    tensors: Sequence[TensorInfo]
    metadata: dict[str, Any] = field(repr=False)

    @cached_property
    def experts(self) -> list[ExpertTensor]:
        """Expert tensors by layer, those of a layer in the order of the file."""
        found = (_expert_tensor(tensor) for tensor in self.tensors)
        return sorted((e for e in found if e), key=lambda e: (e.layer, e.shard, e.offset))

    @cached_property
    def pieces(self) -> list[Piece]:
        """What is read of an expert at once, by layer."""
        return pieces(self.experts)

    @cached_property
    def dense(self) -> list[TensorInfo]:
        """Tensors that hold no experts: loaded once and kept in memory."""
        names = {expert.name for expert in self.experts}
        return [tensor for tensor in self.tensors if tensor.name not in names]

    def loaded(self) -> ModelLayout:
        """Without the blocks that only predict further tokens, which a run does not load."""
        blocks, further = map(self.value, ("block_count", "nextn_predict_layers"))
        if not (blocks and further):
            return self
        kept = [t for t in self.tensors if not _is_beyond(t.name, blocks - further)]
        return ModelLayout(self.shards, kept, self.metadata)

    @property
    def arch(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def value(self, key: str) -> Any:
        """Metadata `<arch>.<key>`; None if it is absent. What differs by layer is a list."""
        return self.metadata.get(f"{self.arch}.{key}")

    @property
    def packed(self) -> bool:
        """Whether an expert's projections stand side by side in its file, which no other program
        can use (`experts.packed`)."""
        return any(tensor.stride for tensor in self.tensors)

    @property
    def n_expert(self) -> int:
        return max((e.n_expert for e in self.experts), default=0)

    def top_k(self, layer: int) -> int:
        """Experts that one token routes to in `layer`."""
        used = self.value("expert_used_count") or 0
        return int(used[layer] if isinstance(used, list) else used)

    @property
    def n_expert_used(self) -> int:
        """Top-k of the layer that uses most experts."""
        return max(map(self.top_k, self.moe_layers), default=0)

    @property
    def moe_layers(self) -> list[int]:
        return sorted({e.layer for e in self.experts})

    @property
    def dense_bytes(self) -> int:
        return sum(t.nbytes for t in self.dense)

    @property
    def expert_bytes(self) -> int:
        """All experts of all layers, in bytes."""
        return sum(e.n_expert * e.expert_bytes for e in self.experts)

    @property
    def file_bytes(self) -> int:
        return sum(s.size for s in self.shards)

    def bytes_by_layer(self) -> dict[int, int]:
        """Bytes of one expert (all its projections), by layer."""
        sizes: dict[int, int] = {}
        for expert in self.experts:
            sizes[expert.layer] = sizes.get(expert.layer, 0) + expert.expert_bytes
        return sizes

    def token_bytes(self, top_k: int | None = None) -> int:
        """Bytes of the experts that one token routes to: the smallest useful cache.

        With `top_k`, it routes to as many experts in every layer.
        """
        sizes = self.bytes_by_layer().items()
        return sum((top_k or self.top_k(layer)) * size for layer, size in sizes)

    def largest_expert(self) -> int:
        """Bytes of one expert of the layer in which they are largest."""
        return max(self.bytes_by_layer().values(), default=0)

    def layer_bytes(self) -> int:
        """Bytes of all experts of the largest layer."""
        sizes: dict[int, int] = {}
        for expert in self.experts:
            whole = expert.n_expert * expert.expert_bytes
            sizes[expert.layer] = sizes.get(expert.layer, 0) + whole
        return max(sizes.values(), default=0)


def _is_beyond(name: str, blocks: int) -> bool:
    match = _BLOCK_NAME.match(name)
    return match is not None and int(match[1]) >= blocks


def _expert_tensor(tensor: TensorInfo) -> ExpertTensor | None:
    match = EXPERT_NAME.match(tensor.name)
    if not match or len(tensor.shape) < 3 or tensor.shape[2] < 2:
        return None
    n_expert = tensor.shape[2]
    return ExpertTensor(
        name=tensor.name,
        layer=int(match[1]),
        projection=match[2],
        quant=tensor.quant,
        n_expert=n_expert,
        shard=tensor.shard,
        offset=tensor.offset,
        expert_bytes=tensor.nbytes // n_expert,
        stride=tensor.stride or tensor.nbytes // n_expert,
    )


_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")


def is_one_of_several(path: Path) -> bool:
    """Whether a file's name says that it is a part of a split model."""
    match = _SPLIT_NAME.match(path.name)
    return match is not None and int(match["count"]) > 1


def shard_paths(path: Path) -> list[Path]:
    """All files of the set that `path` belongs to, first to last; [path] if it is not split.

    Raises:
        ModelError: a file of the set is missing.
    """
    match = _SPLIT_NAME.match(path.name)
    if not match:
        return [path]
    count = int(match["count"])
    paths = [
        path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf")
        for index in range(1, count + 1)
    ]
    missing = [p for p in paths if not p.is_file()]
    if missing:
        raise ModelError(
            f"{missing[0]}: shard missing ({len(missing)} of {count} are); "
            "put all files of the set in one folder"
        )
    return paths


def check_extent(shards: Sequence[Shard], tensors: Iterable[TensorInfo]) -> None:
    """Checks that every tensor lies inside its file.

    Raises:
        ModelError: a file is shorter than its own directory says.
    """
    for tensor in tensors:
        shard = shards[tensor.shard]
        if tensor.end > shard.size:
            raise ModelError(
                f"{shard.path}: truncated: {tensor.name} ends at byte {tensor.end:,} "
                f"but the file has {shard.size:,}; download it again"
            )
