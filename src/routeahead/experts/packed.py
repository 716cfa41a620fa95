"""The layout of a packed file: an expert's projections side by side, so that one read brings it.

`routeahead pack` writes it (`engine.packing`). The directory is a GGUF's: the tensors of the model,
with their shapes and types, each of which begins a block, those of a layer's experts one behind the
other. In the range of these, which is a layer's *region*, the bytes are not where the directory
says: there are expert 0's slices of all of them, in their order, then expert 1's, and so on. What
the tensors' ends were rounded up by is behind the last expert.

A program that does not know this would compute with the wrong bytes, so the file names an
architecture that no other program has. What it was is in a key, with the format's version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from routeahead.errors import ModelError
from routeahead.experts.layout import ExpertTensor, ModelLayout, TensorInfo, ceil_block

ARCHITECTURE = "general.architecture"
VERSION, WAS = "routeahead.pack", "routeahead.pack.architecture"
FINGERPRINT = "routeahead.pack.fingerprint"
"""Key of what `engine.fingerprint` says of the file that was packed."""

NAMED = "routeahead-packed-"
"""What the name of the architecture begins with."""

NOW = 1
"""Of the format."""


def is_packed(metadata: Mapping[str, Any]) -> bool:
    return VERSION in metadata or str(metadata.get(ARCHITECTURE)).startswith(NAMED)


def unpacked_metadata(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A packed file's metadata, with the architecture that the model has.

    Raises:
        ModelError: it is of another version, or damaged.
    """
    version, was = metadata.get(VERSION), metadata.get(WAS)
    if version != NOW:
        raise ModelError(
            f"{path}: packed in format {version!r}, and this routeahead reads {NOW}: pack the "
            "original anew, or use the routeahead that packed it"
        )
    if metadata.get(ARCHITECTURE) != f"{NAMED}{was}":
        raise ModelError(f"{path}: {WAS} is {was!r:.80}: damaged; pack the original anew")
    return {**metadata, ARCHITECTURE: was}


def packed_tensors(path: Path, tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """A packed file's tensors, where their bytes are; `tensors` is what its directory says.

    Raises:
        ModelError: the tensors of a layer's experts are not one behind the other.
    """
    regions: dict[int, list[ExpertTensor]] = {}
    for tensor in ModelLayout([], tensors, {}).experts:
        regions.setdefault(tensor.layer, []).append(tensor)
    places: dict[str, tuple[int, int]] = {}
    for layer, of in regions.items():
        stride, start, end = sum(t.expert_bytes for t in of), of[0].offset, of[0].offset
        for tensor in of:
            if (tensor.shard, tensor.offset, tensor.n_expert) != (0, end, of[0].n_expert):
                raise ModelError(
                    f"{path}: packed, but the experts of layer {layer} are not side by side: "
                    "pack the original anew"
                )
            places[tensor.name] = start, stride
            start += tensor.expert_bytes
            end = ceil_block(end + tensor.n_expert * tensor.expert_bytes)
    return [
        replace(tensor, offset=places[tensor.name][0], stride=places[tensor.name][1])
        if tensor.name in places
        else tensor
        for tensor in tensors
    ]
