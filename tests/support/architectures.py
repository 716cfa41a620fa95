"""Tiny random models of every architecture that the installed llama.cpp has with experts.

Which tensors an architecture wants is not written down: llama.cpp is asked
(`support.llama_library`). Written down is the metadata of a small model of it, and the few tensors
that exclude each other (`support.architecture_table`). `unlisted` names the architectures that are
new to llama.cpp.

    path = write(folder, "grovemoe", LlamaLibrary())
"""

from __future__ import annotations

import ctypes
import re
import zlib
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QuantType

from support import models
from support.architecture_table import LAYERS, MODELS, PLAIN, WIDTH, WITHOUT_EXPERTS, Model
from support.llama_library import LlamaLibrary, Refused, Shapes


def unlisted(library: LlamaLibrary, folder: Path) -> dict[str, str]:
    """Architectures with experts that MODELS lacks, or of which that cannot be said: why.

    Each is described by the plain metadata, and by 1 for what llama.cpp asks for beyond them.
    """
    found = {}
    listed = {model.arch for model in MODELS.values()} | WITHOUT_EXPERTS
    for arch in set(library.architectures()) - listed:
        try:
            shapes = _shapes(library, folder / f"{arch}.metadata", Model(arch, dict(PLAIN)))
        except Refused as refused:
            found[arch] = str(refused)
        else:
            if any("_exps." in name for name in shapes):
                found[arch] = "has experts"
    return found


# --- what to write ---

# Left out unless `keep` has them or llama.cpp asks for them.
_OPTIONAL = re.compile(r"\.(scale|input_scale|bias)$|^rope_f|^cls|^dense_")
_ALWAYS = re.compile(r"exp_probs_b\.bias$|ssm_(dt|conv1d)\.bias$")
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_(ch)?exps\.weight$")


def write(folder: Path, name: str, library: LlamaLibrary) -> Path:
    """Writes the model of that name in MODELS; returns the path to load.

    Raises:
        Refused: llama.cpp does not take it.
    """
    model = MODELS[name]
    path = folder / f"{re.sub(r'[^A-Za-z0-9_-]', '-', name)}.gguf"
    shapes = _shapes(library, path.with_suffix(".metadata"), model)
    required = set[str]()
    while True:
        written = _write(path, model, _chosen(model, shapes, required), zlib.crc32(name.encode()))
        try:
            library.trial(written)
            return written
        except Refused as refused:
            lacking = re.search(r"tensor '(?:blk\.\d+\.)?([^']+)'", str(refused))
            wanted = {tensor for tensor in shapes if lacking and _kind(tensor) == lacking[1]}
            if not wanted - required:
                raise
            required |= wanted


def _kind(tensor: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", tensor)


def _shapes(library: LlamaLibrary, path: Path, model: Model) -> Shapes:
    """All tensors that the architecture may have. `model.keys` gets what llama.cpp asks for."""
    while True:
        _finish(_writer(path, replace(model, further=0)))
        try:
            shapes = library.tensors(path)
            break
        except Refused as refused:
            lacking = re.search(rf"key not found in model: {model.arch}\.(\S+)", str(refused))
            if not lacking or lacking[1] in model.keys:
                raise
            model.keys[lacking[1]] = 1
        finally:
            path.unlink()
    for block in range(LAYERS, LAYERS + model.further):
        last, prefix = f"blk.{LAYERS - 1}.", f"blk.{block}."
        shapes |= {t.replace(last, prefix): ne for t, ne in shapes.items() if t.startswith(last)}
        shapes |= {f"{prefix}nextn.{part}.weight": [WIDTH] for part in ("enorm", "hnorm")}
        shapes[f"{prefix}nextn.eh_proj.weight"] = [2 * WIDTH, WIDTH]
    return shapes


def _chosen(model: Model, shapes: Shapes, required: set[str]) -> Shapes:
    chosen: Shapes = {}
    for tensor, shape in shapes.items():
        optional = _OPTIONAL.search(tensor) and not _ALWAYS.search(tensor)
        left_out = (optional and not re.search(model.keep, tensor)) or re.search(model.drop, tensor)
        if left_out and tensor not in required:
            continue
        if "ffn_gate_up_exps.weight" in tensor and not model.fused:
            half = [shape[0], shape[1] // 2, *shape[2:]]
            chosen |= {tensor.replace("gate_up", part): half for part in ("gate", "up")}
        else:
            chosen[tensor] = shape
    return chosen | model.more


def _writer(path: Path, model: Model, per_shard: int = 0) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, model.arch, split_max_tensors=per_shard)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    keys = dict(model.keys)
    if model.further:
        keys |= {"block_count": LAYERS + model.further, "nextn_predict_layers": model.further}
    kinds = gguf.GGUFValueType
    for key, value in keys.items():
        if key in ("ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes"):
            name = f"{model.arch}.{key}"
            writer.add_key_value(name, value, kinds.ARRAY, sub_type=kinds.UINT64)
        else:
            adders.get(type(value), writer.add_array)(f"{model.arch}.{key}", value)
    models.add_vocabulary(writer)
    if "bert" in model.arch:
        writer.add_token_type_count(1)
        writer.add_mask_token_id(0)
    return writer


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write(path: Path, model: Model, shapes: Shapes, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    writer = _writer(path, model, -(-len(shapes) // model.shards) if model.shards > 1 else 0)
    for tensor, ne in shapes.items():
        shape = tuple(reversed(ne))
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        quant = "F32"
        if _EXPERTS.search(tensor):
            quant = model.experts if shape[-1] % 32 == 0 else "F16"
        elif tensor.endswith("ffn_gate_inp.weight"):
            quant = model.router
        if quant == "F32":
            writer.add_tensor(tensor, _values(rng, model, tensor, shape))
        else:
            std = (1.0 if "exps" in tensor else 2.0) / sqrt(shape[-1])
            writer.add_tensor(
                tensor, _quantised(rng, quant, shape, std), raw_dtype=QuantType[quant]
            )
    first: Path = writer.format_shard_names(path)[0]
    _finish(writer)
    return first


# Mean and deviation of what is no matrix, by the tensor's name; the first that matches.
_SIZES = {
    r"^ffn_gate_inp\.scale$": (sqrt(WIDTH), 0.5),
    r"hc_.*_scale": (0.5, 0.05),
    r"^ssm_d$|norm.*weight$": (1.0, 0.1),
    r"\.scale$|output_scale|^rope_": (1.0, 0.1),
    r"^exp_probs_b\.bias$": (0.0, 0.2),
    r"^attn_sinks\.weight$": (0.0, 1.0),
    r"\.bias$": (0.0, 0.1),
}


def _values(
    rng: np.random.Generator, model: Model, tensor: str, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Random weights that keep a hidden vector's size about the same from layer to layer."""

    def around(mean: float, std: float) -> npt.NDArray[np.float32]:
        return rng.normal(mean, std, shape).astype(np.float32)

    kind = _kind(tensor)
    if kind == "ffn_gate_tid2eid.weight":  # the experts of each token
        experts = int(model.keys["expert_count"])
        rows = [rng.permutation(experts)[: shape[-1]] for _ in range(shape[0])]
        return np.array(rows, np.int32)
    if kind == "ssm_a":
        return -np.abs(around(1.0, 0.3)) - np.float32(0.1)
    for pattern, (mean, std) in _SIZES.items():
        if re.search(pattern, kind):
            return around(mean, std)
    if len(shape) == 1 and not kind.endswith("shexp.weight"):
        return around(0.0, 0.1)
    scale = {"ffn_gate_inp.weight": 2.0, "token_embd.weight": sqrt(shape[-1])}.get(kind, 1.0)
    if kind == "token_embd.weight":  # some architectures multiply embeddings themselves
        scale /= sqrt(shape[-1]) if model.arch == "gemma4" else 1.0
        scale /= 12 if re.match("granite|minicpm", model.arch) else 1.0
    return around(0.0, scale / sqrt(shape[-1]))


def _quantised(
    rng: np.random.Generator, quant: str, shape: tuple[int, ...], std: float
) -> npt.NDArray[np.uint8]:
    """Random weights as llama.cpp quantises them: each row is one of a few, at random."""
    from llama_cpp import llama_cpp as C

    quantise = C._lib.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    block, nbytes = gguf.GGML_QUANT_SIZES[QuantType[quant]]
    rows, width = 256, shape[-1]
    values = rng.normal(0.0, std, (rows, width)).astype(np.float32)
    stored = np.zeros((rows, width // block * nbytes), np.uint8)
    even = np.ones(width, np.float32)  # how much each column matters
    pointers = [array.ctypes.data for array in (values, stored, even)]
    quantise(QuantType[quant], *pointers[:2], 0, rows, width, pointers[2])
    picked: npt.NDArray[np.uint8] = stored[rng.integers(0, rows, shape[:-1])]
    return picked
