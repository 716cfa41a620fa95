"""Tiny Mixture-of-Experts GGUF models with random weights, for the test-suite.

A streaming engine has to cope with what real model files do: several architectures, each with its
own routing rule and tensor names, many quantisations, experts that share disk blocks with their
neighbours, and files split into shards. This module writes such models at a few megabytes each.
Their text is noise, but their routing differs from token to token, which is what matters here.

    path = write(tmp_path / "model.gguf", FIXTURES["gpt-oss"])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod, sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QuantType

# Expert quantisations that `write` can produce; `for_quant` has a shape for each.
QUANTS = ["F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4"]

CONTEXT_LENGTH = 512
HEADS = 4
HEAD_WIDTH = 32
FULL_HEAD_WIDTH = 64  # gemma4: heads of its full-attention layers are wider than the others
DENSE_WIDTH = 160  # inner width of a feed-forward block without experts
RANK, ROPE_WIDTH = 32, 16  # deepseek2: its attention compresses queries and keys to RANK numbers

# The special tokens of a SentencePiece vocabulary, then one token a byte: any text can be encoded.
VOCABULARY = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Spec:
    """What to write. Widths count elements; a row of a weight matrix is one input vector long.

    Gate and up rows are `width` long and down rows `expert_width` long, so both must be multiples
    of the quantisation's block: 256 for the K quants, 32 for Q8_0, Q4_0 and MXFP4, else 1.
    """

    arch: str  # llama.cpp's name of the architecture
    layers: int = 6
    width: int = 96
    experts: int = 16
    top_k: int = 4
    expert_width: int = 96
    quant: str = "Q4_0"
    down_quants: tuple[str, ...] = ()  # if any: the down projections take these in turn, by layer
    fused: bool = False  # gate and up are one tensor: a slice has the gate's rows, then the up's
    shared_width: int = 0  # inner width of the expert that every token uses; 0: there is none
    dense_layers: int = 0  # this many leading layers have no experts
    groups: int = 0  # experts compete within groups, and half of the groups win; 0: no groups
    window: int = 0  # sliding-window attention, in tokens; 0: none
    seed: int = 0


def for_quant(quant: str) -> Spec:
    """Return a small qwen3moe specification whose experts are all stored as `quant`.

    Slices are no multiples of 4,096 bytes where that is possible. Those of Q4_K always are, but
    they share disk blocks all the same, as GGUF starts tensors at any multiple of 32 bytes.
    """
    if quant not in QUANTS:
        raise ValueError(f"unknown expert quantisation {quant!r}; one of {', '.join(QUANTS)}")
    spec = Spec("qwen3moe", quant=quant)
    if quant.endswith("_K"):
        return replace(spec, layers=5, width=256, experts=8, top_k=2, expert_width=256)
    return replace(spec, expert_width=56) if quant in ("F16", "F32") else spec


FIXTURES: dict[str, Spec] = {
    # Softmax over all experts, then the weights of the chosen ones are scaled to sum to 1.
    "qwen3moe": Spec("qwen3moe"),
    # As above without the last step, and with a shared expert that has a gate of its own.
    "qwen2moe": Spec("qwen2moe", quant="F16", expert_width=88, shared_width=160),
    # Slices of 2,176 bytes: a disk block of 4,096 holds parts of two or three of them.
    "olmoe": Spec("olmoe", width=64, experts=32, expert_width=32, quant="Q8_0"),
    # Few, large experts. The architecture of dense Llama models, told apart by an expert count.
    "mixtral": Spec("llama", layers=5, width=128, experts=8, top_k=2, expert_width=160),
    # Biases on the router and on every expert; softmax after the selection, over the chosen few.
    "gpt-oss": Spec("gpt-oss", width=64, experts=32, quant="MXFP4", window=32),
    # Sigmoid scores, a bias that sways the selection only, a leading layer without experts.
    "deepseek2": Spec("deepseek2", width=128, expert_width=64, shared_width=64, dense_layers=1),
    # The best groups are chosen first, and then the experts within them.
    "deepseek2-grouped": Spec(
        "deepseek2", experts=32, expert_width=64, shared_width=64, dense_layers=1, groups=8
    ),
    # Gate and up in one tensor, a scale for each expert, a router that sees another vector than
    # the experts do, and attention layers of two shapes.
    "gemma4": Spec("gemma4", width=128, expert_width=64, quant="Q8_0", fused=True, window=32),
    # Files labelled Q4_K_M give part of the layers a more exact down projection.
    "mixed": replace(for_quant("Q4_K"), experts=10, top_k=3, down_quants=("Q6_K", "Q4_K")),
}


def write(path: Path, spec: Spec, *, shards: int = 1) -> Path:
    """Write the model and return the path to load: `path`, or the first shard's.

    The same specification gives the same weights at every call, in one file or in several. With
    `shards` above 1, the files are named `<stem>-00001-of-0000N.gguf` and so on beside `path`.
    """
    tensors = _tensors(spec)
    per_shard = -(-len(tensors) // shards) if shards > 1 else 0
    writer = gguf.GGUFWriter(path, spec.arch, split_max_tensors=per_shard)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in _metadata(spec).items():
        add: Any = adders.get(type(value), writer.add_array)
        add(f"{spec.arch}.{key}", value)
    add_vocabulary(writer)
    for name, quant, data in tensors:
        writer.add_tensor(name, data, raw_dtype=QuantType[quant])
    files = writer.format_shard_names(path)
    if len(files) != shards:
        raise ValueError(f"{len(tensors)} tensors do not split evenly into {shards} shards")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return files[0]


def _metadata(spec: Spec) -> dict[str, Any]:
    """Return the model's settings by key, less the architecture's name that precedes each key."""
    head = FULL_HEAD_WIDTH if spec.arch == "gemma4" else _head_width(spec, layer=0)
    settings = {
        "context_length": CONTEXT_LENGTH,
        "embedding_length": spec.width,
        "block_count": spec.layers,
        "feed_forward_length": DENSE_WIDTH,
        "expert_feed_forward_length": spec.expert_width,
        "expert_count": spec.experts,
        "expert_used_count": spec.top_k,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.head_count": HEADS,
        "attention.head_count_kv": _kv_heads(spec),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "rope.freq_base": 1e4,
    }
    if spec.window:
        settings["attention.sliding_window"] = spec.window
    if spec.arch in ("llama", "olmoe"):  # these read an expert's width from the dense block's key
        settings["feed_forward_length"] = spec.expert_width
    if spec.arch == "qwen2moe":
        settings["expert_shared_feed_forward_length"] = spec.shared_width
    if spec.arch == "deepseek2":
        settings |= _deepseek2_metadata(spec)
    if spec.arch == "gemma4":
        settings |= _gemma4_metadata(spec)
    return settings


def _deepseek2_metadata(spec: Spec) -> dict[str, Any]:
    return {
        # The cache holds one compressed head; the `_mla` keys describe those it expands to.
        "attention.head_count_kv": 1,
        "attention.key_length": RANK + ROPE_WIDTH,
        "attention.value_length": RANK,
        "attention.key_length_mla": HEAD_WIDTH,
        "attention.value_length_mla": HEAD_WIDTH,
        "attention.q_lora_rank": RANK,
        "attention.kv_lora_rank": RANK,
        "rope.dimension_count": ROPE_WIDTH,
        "leading_dense_block_count": spec.dense_layers,
        # The loader derives the shared expert's width from a count of ordinary ones.
        "expert_shared_count": spec.shared_width // spec.expert_width,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_group_count": spec.groups,
        "expert_group_used_count": spec.groups // 2,
    }


def _gemma4_metadata(spec: Spec) -> dict[str, Any]:
    return {
        "attention.sliding_window_pattern": [_is_windowed(layer) for layer in range(spec.layers)],
        "attention.key_length_swa": HEAD_WIDTH,
        "attention.value_length_swa": HEAD_WIDTH,
        "rope.dimension_count_swa": HEAD_WIDTH,
        "rope.freq_base_swa": 1e4,
        "embedding_length_per_layer_input": 0,  # a required key, used by small dense models only
        "final_logit_softcapping": 30.0,
    }


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCABULARY)
    writer.add_token_scores([0.0] * len(VOCABULARY))
    writer.add_token_types([kinds.UNKNOWN] + [kinds.CONTROL] * 2 + [kinds.BYTE] * 256)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


class _TensorList:
    """Collects (name, quantisation, data) of tensors, all drawn from one random stream."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.prefix = ""  # goes before every name
        self.items: list[tuple[str, str, npt.NDArray[Any]]] = []

    def matrix(self, name: str, *shape: int, scale: float = 1.0, quant: str = "F32") -> None:
        """Add weights that map an input of unit variance to an output of variance `scale`**2.

        Shapes are NumPy's: the input width comes last (GGUF and llama.cpp list it first).
        """
        data = _random_weights(self.rng, shape, quant, scale / sqrt(shape[-1]))
        self.items.append((self.prefix + name, quant, data))

    def vector(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> None:
        """Add float32 parameters that are no matrix: biases, scales and (of mean 1) norms."""
        data = self.rng.normal(mean, std, shape).astype(np.float32)
        self.items.append((self.prefix + name, "F32", data))


def _tensors(spec: Spec) -> list[tuple[str, str, npt.NDArray[Any]]]:
    """Return every tensor of the model, in file order."""
    out = _TensorList(spec.seed)
    # gemma4 multiplies embeddings by sqrt(width); all models then start from unit variance.
    embedding_scale = 1.0 if spec.arch == "gemma4" else sqrt(spec.width)
    out.matrix("token_embd.weight", len(VOCABULARY), spec.width, scale=embedding_scale)
    out.vector("output_norm.weight", spec.width, mean=1.0)
    out.matrix("output.weight", len(VOCABULARY), spec.width)
    if spec.arch == "gemma4":
        out.vector("rope_freqs.weight", FULL_HEAD_WIDTH // 2, mean=1.0)
    for layer in range(spec.layers):
        out.prefix = f"blk.{layer}."
        _add_norms(out, spec)
        if spec.arch == "deepseek2":
            _add_compressed_attention(out, spec)
        else:
            _add_attention(out, spec, layer)
        if spec.arch == "gemma4" or layer < spec.dense_layers:
            _add_feed_forward(out, spec, "", DENSE_WIDTH)
        if layer >= spec.dense_layers:
            _add_router(out, spec)
            _add_experts(out, spec, layer)
    return out.items


def _add_norms(out: _TensorList, spec: Spec) -> None:
    names = ["attn_norm", "ffn_norm"]
    if spec.arch == "gpt-oss":
        names[1] = "post_attention_norm"  # another name for the same place
    if spec.arch == "gemma4":
        names += ["post_attention_norm", "pre_ffw_norm_2", "post_ffw_norm"]
        names += ["post_ffw_norm_1", "post_ffw_norm_2"]  # of the dense block and of the experts
        out.vector("layer_output_scale.weight", 1, mean=0.9)
    for name in names:
        out.vector(f"{name}.weight", spec.width, mean=1.0)


def _add_attention(out: _TensorList, spec: Spec, layer: int) -> None:
    """Add attention with separate query, key and value matrices, and the architecture's extras."""
    head, kv_heads = _head_width(spec, layer), _kv_heads(spec)
    widths = {"q": HEADS * head, "k": kv_heads * head, "v": kv_heads * head}
    if spec.arch == "gemma4" and not _is_windowed(layer):
        del widths["v"]  # gemma4's full-attention layers use the keys as values
    for part, width in widths.items():
        out.matrix(f"attn_{part}.weight", width, spec.width)
        if spec.arch in ("qwen2moe", "gpt-oss"):
            out.vector(f"attn_{part}.bias", width)
    out.matrix("attn_output.weight", spec.width, widths["q"])
    if spec.arch in ("qwen3moe", "gemma4", "olmoe"):
        for part in ("q", "k"):  # olmoe normalises all heads as one vector, the others each head
            width = widths[part] if spec.arch == "olmoe" else head
            out.vector(f"attn_{part}_norm.weight", width, mean=1.0)
    if spec.arch == "gpt-oss":
        out.vector("attn_output.bias", spec.width)
        out.vector("attn_sinks.weight", HEADS, std=1.0)


def _add_compressed_attention(out: _TensorList, spec: Spec) -> None:
    """Add deepseek2's attention, whose keys and values come from one short shared vector."""
    out.matrix("attn_q_a.weight", RANK, spec.width)
    out.vector("attn_q_a_norm.weight", RANK, mean=1.0)
    out.matrix("attn_q_b.weight", HEADS * HEAD_WIDTH, RANK)
    out.matrix("attn_kv_a_mqa.weight", RANK + ROPE_WIDTH, spec.width)
    out.vector("attn_kv_a_norm.weight", RANK, mean=1.0)
    out.matrix("attn_k_b.weight", HEADS, RANK, HEAD_WIDTH - ROPE_WIDTH)
    out.matrix("attn_v_b.weight", HEADS, HEAD_WIDTH, RANK)
    out.matrix("attn_output.weight", spec.width, HEADS * HEAD_WIDTH)


def _add_feed_forward(out: _TensorList, spec: Spec, suffix: str, inner: int) -> None:
    """Add a block that every token uses: a dense layer's, or ("_shexp") a shared expert."""
    out.matrix(f"ffn_gate{suffix}.weight", inner, spec.width)
    out.matrix(f"ffn_up{suffix}.weight", inner, spec.width)
    out.matrix(f"ffn_down{suffix}.weight", spec.width, inner)


def _add_router(out: _TensorList, spec: Spec) -> None:
    """Add the matrix that scores the experts, and what else takes part in choosing them."""
    # Scores of standard deviation 2 make choices depend on the token, yet no expert's weight tiny.
    out.matrix("ffn_gate_inp.weight", spec.experts, spec.width, scale=2.0)
    if spec.arch == "gpt-oss":
        out.vector("ffn_gate_inp.bias", spec.experts, std=0.5)
    if spec.arch == "deepseek2":
        out.vector("exp_probs_b.bias", spec.experts, std=0.2)
    if spec.arch == "gemma4":  # undoes the division by sqrt(width) that precedes it
        out.vector("ffn_gate_inp.scale", spec.width, mean=sqrt(spec.width), std=0.5)


def _add_experts(out: _TensorList, spec: Spec, layer: int) -> None:
    """Add the routed experts of a layer, one tensor a projection, and the shared expert if any."""
    inner, outer = spec.expert_width, spec.width
    shapes = {"gate": (inner, outer), "up": (inner, outer), "down": (outer, inner)}
    if spec.fused:
        shapes = {"gate_up": (2 * inner, outer), "down": (outer, inner)}
    for part, shape in shapes.items():
        quants = (part == "down" and spec.down_quants) or (spec.quant,)
        quant = quants[layer % len(quants)]
        out.matrix(f"ffn_{part}_exps.weight", spec.experts, *shape, quant=quant)
        if spec.arch == "gpt-oss":
            out.vector(f"ffn_{part}_exps.bias", spec.experts, shape[0])
    if spec.arch == "gemma4":
        out.vector("ffn_down_exps.scale", spec.experts, mean=1.0, std=0.2)
    if spec.shared_width:
        _add_feed_forward(out, spec, "_shexp", spec.shared_width)
    if spec.arch == "qwen2moe":
        out.matrix("ffn_gate_inp_shexp.weight", spec.width)


def _is_windowed(layer: int) -> bool:
    """Tell whether a gemma4 layer's attention is limited to the window: all but each third are."""
    return layer % 3 != 2


def _head_width(spec: Spec, layer: int) -> int:
    if spec.arch == "gemma4" and not _is_windowed(layer):
        return FULL_HEAD_WIDTH
    divided = spec.arch in ("qwen2moe", "olmoe", "llama")  # their heads divide the width up
    return spec.width // HEADS if divided else HEAD_WIDTH


def _kv_heads(spec: Spec) -> int:
    return HEADS if spec.arch == "olmoe" else HEADS // 2


def _random_weights(
    rng: np.random.Generator, shape: tuple[int, ...], quant: str, std: float
) -> npt.NDArray[Any]:
    """Return random weights of a standard deviation, stored as `quant`.

    Floats keep `shape`; quantised weights are uint8, and their last axis counts bytes.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[QuantType[quant]]
    if shape[-1] % block:
        raise ValueError(f"{quant} needs rows of a multiple of {block} elements, not {shape[-1]}")
    if quant in ("Q4_K", "Q6_K"):
        blocks = _k_quant_blocks(rng, quant, prod(shape) // block, std)
        return blocks.reshape(*shape[:-1], shape[-1] // block * block_bytes)
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
    return gguf.quants.quantize(values, QuantType[quant])


def _k_quant_blocks(
    rng: np.random.Generator, quant: str, count: int, std: float
) -> npt.NDArray[np.uint8]:
    """Return `count` random blocks of 256 weights, as uint8 rows of 144 (Q4_K) or 210 (Q6_K) bytes.

    gguf-py cannot quantise to these formats, but any bytes are a valid block as long as its
    float16 steps are sensible. A Q4_K block starts with two, d and dmin; a weight is d*s*q - dmin*m
    with s and m in 0..63 and q in 0..15. A Q6_K block ends with one; a weight is d*s*q with s in
    -128..127 and q in -32..31. Uniform bytes then give the deviations divided by here.
    """
    blocks = rng.integers(0, 256, (count, 144 if quant == "Q4_K" else 210), dtype=np.uint8)
    if quant == "Q4_K":  # dmin = 7.5*d makes the mean zero
        blocks[:, :4] = np.array([std / 258.3, 7.5 * std / 258.3], "<f2").view(np.uint8)
    else:
        blocks[:, -2:] = np.array([std / 1365.7], "<f2").view(np.uint8)
    return blocks
