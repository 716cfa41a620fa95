"""Write a small trained model at a large model's shape: `inflate_model.py SMALL.gguf LARGE.gguf`.

The same function, up to rounding, and the same routing, but with experts as large as those of
Qwen3-30B-A3B. On the small model itself a read is a few KB, so that latency decides and reading
early shows nothing; on a random model of that size quality means nothing. On this one both can be
measured.

Every vector of the residual stream gets zeros behind its numbers, and every matrix zeros in the
rows and columns that belong to them; experts get inner rows of zeros. An RMS norm divides by the
root of the mean square, which the zeros make smaller by old/new: so its weights are scaled by
sqrt(old/new), and epsilon by old/new. (The norms of queries and keys have the same epsilon and no
zeros: there it should have stayed, and cannot. Perplexity differs by a third of a percent.)
Quantised blocks are copied whole, so that each number stays
what it was; the zeros are blocks of zeros. Attention heads keep their number and width.

With `--gates`, matrices that were calibrated for the small model (`routeahead calibrate`) are
written for the large one beside it, as LARGE.gates.safetensors: a router is given the same vector
with zeros behind it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QuantType

from routeahead.engine.fingerprint import fingerprint
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.prediction.gates import Gate, Gates, read_gates, write_gates

ARCH = "qwen3moe"
WIDTH, EXPERT_WIDTH = 2048, 768
HEADROOM = 1 << 30


@dataclass(frozen=True)
class Growth:
    """Old and new widths, in numbers."""

    width: int
    new_width: int
    inner: int
    new_inner: int

    def shape(self, name: str, old: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor's new shape; NumPy's order, the input width last.

        Raises:
            SystemExit: it is no tensor of a qwen3moe.
        """
        part = name.removeprefix("blk.").partition(".")[2] if name.startswith("blk.") else name
        if part.endswith("_norm.weight") and old == (self.width,):
            return (self.new_width,)
        grown = {
            "token_embd.weight": (old[0], self.new_width),
            "output.weight": (old[0], self.new_width),
            "attn_output.weight": (self.new_width, old[-1]),
            "ffn_gate_inp.weight": (*old[:-1], self.new_width),
            "ffn_gate_exps.weight": (old[0], self.new_inner, self.new_width),
            "ffn_up_exps.weight": (old[0], self.new_inner, self.new_width),
            "ffn_down_exps.weight": (old[0], self.new_width, self.new_inner),
        }
        grown |= {f"attn_{one}.weight": (old[0], self.new_width) for one in "qkv"}
        if part in ("attn_q_norm.weight", "attn_k_norm.weight"):  # of a head
            return old
        if part not in grown:
            sys.exit(f"{name}: this script knows nothing of such a tensor: it was not written")
        return grown[part]

    def norm_scale(self) -> float:
        return sqrt(self.width / self.new_width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("small", type=Path)
    parser.add_argument("large", type=Path)
    parser.add_argument("--width", type=int, default=WIDTH, help="of the residual stream")
    parser.add_argument("--expert-width", type=int, default=EXPERT_WIDTH, help="inside an expert")
    parser.add_argument("--gates", type=Path, help="calibrated for the small model")
    arguments = parser.parse_args()
    reader = gguf.GGUFReader(arguments.small)
    arch = reader.fields["general.architecture"].contents()
    if arch != ARCH:  # qwen2moe's queries, say, have to be as wide as its residual stream
        sys.exit(f"{arguments.small}: is a {arch}: this script knows {ARCH} only")
    growth = growth_of(reader, arguments.width, arguments.expert_width)
    tensors = list(describe(reader, growth))
    need = sum(size for *_, size in tensors)
    if need + HEADROOM > shutil.disk_usage(arguments.large.parent).free:
        sys.exit(f"{arguments.large}: needs {need >> 20} MiB, and the disk has less")
    temporary = arguments.large.with_name(f".{arguments.large.name}.partial")
    try:
        write(reader, growth, tensors, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(arguments.large)
    finally:
        temporary.unlink(missing_ok=True)
    if arguments.gates:
        inflate_gates(arguments.gates, arguments.small, arguments.large)
    print(f"{arguments.large}: {arguments.large.stat().st_size / 2**20:.0f} MiB")


def inflate_gates(path: Path, small: Path, large: Path) -> None:
    """Writes the small model's calibrated routers for the large model."""
    before, after = (read_layout(model).loaded() for model in (small, large))
    gates = read_gates(path, fingerprint(before))
    width = int(after.value("embedding_length"))

    def grown(gate: Gate) -> Gate:
        if gate.matrix is None:
            return gate
        matrix = np.zeros((len(gate.matrix), width), np.float32)
        matrix[:, : gate.matrix.shape[1]] = gate.matrix
        return replace(gate, matrix=matrix)

    made = map(grown, gates.gates.values())
    found = Gates.of(fingerprint(after), made, fitted=gates.fitted, held=gates.held)
    write_gates(large.with_suffix(".gates.safetensors"), found)


def value(reader: gguf.GGUFReader, key: str) -> Any:
    arch = reader.fields["general.architecture"].contents()
    return reader.fields[f"{arch}.{key}"].contents()


def growth_of(reader: gguf.GGUFReader, width: int, inner: int) -> Growth:
    """
    Raises:
        SystemExit: a new width is smaller than the old one, or does not consist of whole blocks.
    """
    old_width, old_inner = (
        value(reader, "embedding_length"),
        value(reader, "expert_feed_forward_length"),
    )
    for old, new, what in ((old_width, width, "--width"), (old_inner, inner, "--expert-width")):
        if new < old or new % 32:
            sys.exit(f"{what} {new}: give a multiple of 32, at least the model's {old}")
    return Growth(old_width, width, old_inner, inner)


Described = tuple[gguf.ReaderTensor, tuple[int, ...], int]


def describe(reader: gguf.GGUFReader, growth: Growth) -> Iterator[Described]:
    """Each tensor with its new shape and its new size in bytes."""
    for tensor in reader.tensors:
        old = tuple(int(n) for n in tensor.shape)[::-1]
        new = growth.shape(tensor.name, old)
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        yield tensor, new, int(np.prod(new)) // block * size


def write(reader: gguf.GGUFReader, growth: Growth, tensors: list[Described], path: Path) -> None:
    arch = reader.fields["general.architecture"].contents()
    changed = {
        f"{arch}.embedding_length": growth.new_width,
        f"{arch}.feed_forward_length": growth.new_inner,
        f"{arch}.expert_feed_forward_length": growth.new_inner,
        f"{arch}.attention.layer_norm_rms_epsilon": value(
            reader, "attention.layer_norm_rms_epsilon"
        )
        * growth.width
        / growth.new_width,
        "general.name": f"{reader.fields['general.name'].contents()}, inflated",
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, changed.get(key, field.contents()), kind, sub_type=inner)
    for tensor, shape, size in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        stored = (*shape[:-1], shape[-1] // block * block_bytes)
        plain = tensor.tensor_type == QuantType.F32
        writer.add_tensor_info(
            tensor.name,
            shape if plain else stored,
            np.dtype(np.float32) if plain else np.dtype(np.uint8),
            size,
            raw_dtype=None if plain else tensor.tensor_type,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, shape, _ in tensors:
        writer.write_tensor_data(padded(tensor, shape, growth))
    writer.close()


def padded(tensor: gguf.ReaderTensor, shape: tuple[int, ...], growth: Growth) -> npt.NDArray[Any]:
    """The tensor's numbers, or bytes of whole blocks, with zeros behind them in each dimension."""
    data = np.asarray(tensor.data)
    if tensor.tensor_type == QuantType.F32:
        old = tuple(int(n) for n in tensor.shape)[::-1]
        scale = growth.norm_scale() if old == (growth.width,) and "norm" in tensor.name else 1.0
        data, stored = data.reshape(old) * np.float32(scale), shape
    else:
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        stored = (*shape[:-1], shape[-1] // block * block_bytes)
    large = np.zeros(stored, data.dtype)
    large[tuple(slice(0, n) for n in data.shape)] = data
    return large


if __name__ == "__main__":
    main()
