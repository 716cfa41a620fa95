"""Tiny random models of every architecture that the installed llama.cpp has with experts.

Which tensors an architecture wants is not written down here: llama.cpp is asked
(`support.llama_library`). Written down is the metadata that describes a small model of it, and the
few tensors that exclude each other. An architecture that is new to llama.cpp is described by the
plain metadata until somebody adds it; `unlisted` names those.

    path = write(folder, "grovemoe", LlamaLibrary())
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QuantType

from support import models
from support.llama_library import LlamaLibrary, Refused, Shapes

Keys = dict[str, Any]

LAYERS, WIDTH, DENSE, INNER, EXPERTS, TOP_K = 4, 128, 160, 64, 16, 4
SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 1, 2, 4  # llama.cpp's gating functions

PLAIN: Keys = {
    "vocab_size": len(models.VOCABULARY), "context_length": 512, "block_count": LAYERS,
    "embedding_length": WIDTH, "feed_forward_length": DENSE, "expert_feed_forward_length": INNER,
    "expert_count": EXPERTS, "expert_used_count": TOP_K,
    "attention.head_count": 4, "attention.head_count_kv": 2,
    "attention.key_length": 32, "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.layer_norm_epsilon": 1e-5,
    "rope.dimension_count": 32, "rope.freq_base": 1e4,
}  # fmt: skip

# Parts of descriptions. None takes a key away.
ONE_WIDTH: Keys = {"feed_forward_length": INNER, "expert_feed_forward_length": None}
SHARED: Keys = {"expert_shared_feed_forward_length": INNER}
BIASED: Keys = {  # as DeepSeek-V3: a dense layer, a shared expert, sigmoid scores
    **SHARED, "expert_shared_count": 1, "leading_dense_block_count": 1,
    "expert_gating_func": SIGMOID, "expert_weights_norm": True, "expert_weights_scale": 1.5,
}  # fmt: skip
GROUPS: Keys = {"expert_group_count": 4, "expert_group_used_count": 2}
LATENT_ATTENTION: Keys = {
    "attention.head_count_kv": 1, "attention.key_length": 48, "attention.value_length": 32,
    "attention.key_length_mla": 32, "attention.value_length_mla": 32,
    "attention.q_lora_rank": 32, "attention.kv_lora_rank": 32, "rope.dimension_count": 16,
}  # fmt: skip
INDEXER: Keys = {
    "attention.indexer.head_count": 2, "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 16,
}  # fmt: skip
WINDOW: Keys = {"attention.sliding_window": 16}
EVERY_OTHER: Keys = {**WINDOW, "attention.sliding_window_pattern": [True, False] * 2}
MAMBA: Keys = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 256, "ssm.state_size": 16, "ssm.time_step_rank": 8,
}  # fmt: skip
DELTA_NET: Keys = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 32, "ssm.time_step_rank": 4,
    "ssm.group_count": 2, "full_attention_interval": 2,
}  # fmt: skip
KIMI: Keys = {
    **LATENT_ATTENTION, "attention.head_count_kv": [0, 1, 0, 1], "kda.head_dim": 32,
    "kda.gate_lower_bound": -5.0, "kda.safe_gate": True, "ssm.conv_kernel": 4,
}  # fmt: skip
SECTIONS: Keys = {"rope.dimension_sections": [8, 4, 4, 0]}
STREAMS: Keys = {
    "hyper_connection.count": 4, "hyper_connection.epsilon": 1e-6, "hyper_connection.low_rank": 16,
    "hyper_connection.sinkhorn_iterations": 4, "hyper_connection.magnitude": 1.0,
}  # fmt: skip
GRANITE: Keys = {
    **ONE_WIDTH, "logit_scale": 8.0, "residual_scale": 0.22, "embedding_scale": 12.0,
    "attention.scale": 0.1,
}  # fmt: skip
NO_CACHE: Keys = {"attention.causal": False}
OUTPUT_GROUPS: Keys = {
    **BIASED, **STREAMS, **WINDOW, "expert_gating_func": SQRT_SOFTPLUS,
    "attention.head_count_kv": 1, "attention.q_lora_rank": 32, "attention.output_group_count": 2,
    "attention.output_lora_rank": 32, "rope.dimension_count": 16, "swiglu_clamp_exp": [10.0] * 4,
}  # fmt: skip
DEEPSEEK4: Keys = {
    **OUTPUT_GROUPS, **INDEXER, "attention.compress_rope_freq_base": 1e4, "hash_layer_count": 1,
    "attention.compress_ratios": [0, 0, 4, 4],
}  # fmt: skip
SIX_LAYERS: Keys = {
    "block_count": 6, "swiglu_clamp_exp": [10.0] * 6,
    "attention.compress_ratios": [0, 0, 4, 4, 4, 4],
}  # fmt: skip
NEMOTRON: Keys = {
    **BIASED, **MAMBA, "ssm.group_count": 1, "block_count": 6, "leading_dense_block_count": None,
    "expert_gating_func": None, "attention.head_count_kv": [0, 0, 2, 0, 0, 0],
    "feed_forward_length": [0, INNER, 0, INNER, 0, INNER],
}  # fmt: skip
QWEN4: Keys = {**DELTA_NET, **SECTIONS, **STREAMS, **INDEXER, **SHARED}
NGRAMS: Keys = {
    "ple.layers": [0], "ple.ngram_size": 3, "ple.heads_per_ngram": 2, "ple.conv_kernel": 4,
    "ple.eos_token_id": 2, "embedding_length_per_layer_input": WIDTH // 4,
    "ple.layer_multipliers": [1, 31, 961], "ple.head_offsets": [0, 53, 106, 159],
    "ple.head_vocab_sizes": [53] * 4,
}  # fmt: skip
TWO_OF_EIGHT: Keys = {"expert_count": 8, "expert_used_count": 2}
K_QUANT: Keys = {  # a K quant's block has 256 weights
    **TWO_OF_EIGHT, "embedding_length": 256, "expert_feed_forward_length": 256, "block_count": 3,
}  # fmt: skip

_FIRST_DENSE = r"blk\.0\.(ffn_(gate_inp|(gate|up|down)_(exps|shexp))\.|exp_probs_b)"
_OTHERS_SPARSE = r"blk\.[1-9]\.ffn_(gate|up|down)\.weight"


@dataclass(frozen=True)
class Model:
    """A model to write.

    Attributes:
        keys: its metadata, without the architecture's name before each key.
        keep: which of the optional tensors it has; a regular expression.
        drop: which tensors it has not, although the architecture may have them.
        experts, router: how those weights are stored.
        fused: gate and up are one tensor, if the architecture has a name for it.
        further: blocks at the end that predict further tokens.
        shards: files.
    """

    arch: str
    keys: Keys
    keep: str = "$^"
    drop: str = "$^"
    experts: str = "Q4_0"
    router: str = "F32"
    fused: bool = False
    further: int = 0
    shards: int = 1
    more: Shapes = field(default_factory=dict)  # tensors that llama.cpp does not name


def _models() -> Iterator[tuple[str, Model]]:
    def tiny(name: str, *parts: Keys, **options: Any) -> tuple[str, Model]:
        keys = dict(PLAIN)
        for part in parts:
            keys.update(part)
        keys = {key: value for key, value in keys.items() if value is not None}
        return name, Model(name.partition(":")[0], keys, **options)

    yield tiny("afmoe", BIASED, WINDOW)
    yield tiny("arctic", ONE_WIDTH, {"expert_used_count": 2})
    yield tiny("bailingmoe", BIASED, {"leading_dense_block_count": None, "expert_gating_func": None})
    yield tiny("bailingmoe2", BIASED, GROUPS)
    yield tiny("bailingmoe2:further", BIASED, GROUPS, further=1,
               more={f"blk.{LAYERS}.layer_output_norm.weight": [WIDTH]})  # fmt: skip
    yield tiny("bailingmoe3", BIASED, KIMI)
    yield tiny("cohere2moe", BIASED, WINDOW,
               {"logit_scale": 0.25, "attention.layer_norm_rms_epsilon": None})  # fmt: skip
    yield tiny("dbrx", ONE_WIDTH, {"attention.clamp_kqv": 8.0})
    yield tiny("deci", ONE_WIDTH)
    yield tiny("deepseek", BIASED, {"expert_weights_norm": None, "expert_gating_func": None,
                                    "expert_weights_scale": 1.0})  # fmt: skip
    yield tiny("deepseek2", BIASED, LATENT_ATTENTION)
    yield tiny("deepseek2:fused", BIASED, LATENT_ATTENTION, fused=True)
    yield tiny("deepseek2:grouped", BIASED, LATENT_ATTENTION, GROUPS)
    yield tiny("deepseek2:softmax", BIASED, LATENT_ATTENTION,
               {"expert_gating_func": SOFTMAX, "expert_weights_norm": False,
                "expert_weights_scale": 16.0, "expert_shared_count": 2}, drop="exp_probs_b")  # fmt: skip
    yield tiny("deepseek2-ocr", BIASED, {"expert_gating_func": SOFTMAX,
                                         "attention.head_count_kv": 4}, drop="exp_probs_b")  # fmt: skip
    yield tiny("deepseek32", BIASED, LATENT_ATTENTION, INDEXER, GROUPS)
    yield tiny("deepseek4", DEEPSEEK4, drop="exp_probs_b_vl")
    yield tiny("deepseek4:table3", DEEPSEEK4, SIX_LAYERS, {"hash_layer_count": 3},
               drop="exp_probs_b_vl")  # fmt: skip
    yield tiny("deepseek4:no table", DEEPSEEK4, {"hash_layer_count": 0}, drop="exp_probs_b_vl")
    yield tiny("dflash", OUTPUT_GROUPS, {"target_layers": [0, 1]})
    yield tiny("dots1", BIASED, {"attention.head_count_kv": 4}, experts="F16")
    yield tiny("dots3note", BIASED, LATENT_ATTENTION, INDEXER, EVERY_OTHER,
               {"attention.kv_lora_rank": 48, "attention.kv_lora_rank_swa": 48,
                "attention.key_length": 64, "attention.key_length_swa": 64,
                "attention.value_length": 48, "attention.key_length_mla_swa": 32,
                "attention.value_length_mla_swa": 32, "rope.freq_base_swa": 1e4,
                "attention.indexer.types": [1] * 4})  # fmt: skip
    yield tiny("ernie4_5-moe", BIASED, {"expert_gating_func": None, "interleave_moe_layer_step": 1})
    yield tiny("exaone-moe", BIASED, WINDOW, GROUPS)
    yield tiny("gemma4", WINDOW,
               {"attention.sliding_window_pattern": [True, True, False, True],
                "attention.key_length": 64, "attention.value_length": 64,
                "attention.key_length_swa": 32, "attention.value_length_swa": 32,
                "rope.dimension_count": 64, "rope.dimension_count_swa": 32,
                "rope.freq_base_swa": 1e4, "embedding_length_per_layer_input": 0,
                "final_logit_softcapping": 30.0},
               keep=r"down_exps\.scale|gate_inp\.scale|output_scale|rope_freqs",
               experts="Q8_0", fused=True)  # fmt: skip
    yield tiny("glm-dsa", BIASED, LATENT_ATTENTION, INDEXER)
    yield tiny("glm4moe", BIASED, SECTIONS, experts="Q8_0")
    yield tiny("glm4moe:further", BIASED, SECTIONS, experts="Q8_0", further=1)
    yield tiny("glm5-next", BIASED, KIMI, STREAMS, INDEXER,
               {"attention.indexer.kpool": 4, "rope.dimension_count": 0,
                "attention.key_length": 32})  # fmt: skip
    yield tiny("gpt-oss", WINDOW, experts="MXFP4")
    yield tiny("granite", GRANITE)
    yield tiny("granite_swa", GRANITE, EVERY_OTHER)
    yield tiny("granitehybrid", GRANITE, SHARED, MAMBA,
               {"ssm.group_count": 1, "attention.head_count_kv": [0, 2, 0, 2]})  # fmt: skip
    yield tiny("granitemoe", GRANITE)
    yield tiny("granitemoe:shared", GRANITE, SHARED)
    yield tiny("graniteswitch", GRANITE,
               {"adapters.count": 2, "adapters.lora_rank": 8,
                "adapters.token_ids_activate": [10, 11],
                "adapters.token_ids_substitute": [12, 13]})  # fmt: skip
    yield tiny("grok", TWO_OF_EIGHT,
               {"router_logit_softcapping": 30.0, "attn_logit_softcapping": 30.0,
                "final_logit_softcapping": 30.0}, experts="Q8_0")  # fmt: skip
    yield tiny("grovemoe", {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.05,
                            "experts_per_group": 2})  # fmt: skip
    yield tiny("hunyuan-moe", SHARED)
    yield tiny("hy_v3", BIASED)
    yield tiny("hy_v4", BIASED, LATENT_ATTENTION, STREAMS, INDEXER,
               {"attention.indexer.types": [1] * 4})  # fmt: skip
    yield tiny("jamba", ONE_WIDTH, MAMBA,
               {"block_count": 6, "expert_used_count": 2,
                "attention.head_count_kv": [0, 2, 0, 2, 0, 2]},
               drop=r"blk\.[024]\.ffn_(gate_inp|(gate|up|down)_exps)\.", experts="Q8_0",
               more={f"blk.{layer}.ffn_{part}.weight":
                     [INNER, WIDTH] if part == "down" else [WIDTH, INNER]
                     for layer in (0, 2, 4) for part in ("gate", "up", "down")})  # fmt: skip
    yield tiny("kimi-k3", BIASED, KIMI,
               {"attn_res_block_size": 2, "attn_res.block_size": 2, "expert_latent_length": 64,
                "activation.situ_beta": 4.0, "activation.situ_linear_beta": 4.0})  # fmt: skip
    yield tiny("kimi-linear", BIASED, KIMI)
    yield tiny("laguna", BIASED, WINDOW)
    yield tiny("lfm2moe", {"shortconv.l_cache": 3, "expert_gating_func": SIGMOID,
                           "leading_dense_block_count": 1,
                           "attention.head_count_kv": [0, 2, 0, 2]})  # fmt: skip
    yield tiny("llada-moe", NO_CACHE)
    yield tiny("llama", ONE_WIDTH)
    yield tiny("llama-embed", ONE_WIDTH, NO_CACHE, {"pooling_type": 1})
    yield tiny("llama4", {"interleave_moe_layer_step": 1, "expert_used_count": 1})
    yield tiny("llama4:interleaved", WINDOW, {"interleave_moe_layer_step": 2, "block_count": 6,
                                              "expert_used_count": 1})  # fmt: skip
    yield tiny("llama4:top4", {"interleave_moe_layer_step": 1})
    yield tiny("maple", EVERY_OTHER, {"swiglu_clamp_exp": [7.0] * 4})
    yield tiny("mellum", WINDOW)
    yield tiny("mimo2", EVERY_OTHER, {"rope.freq_base_swa": 1e4, "expert_gating_func": SIGMOID},
               drop=f"{_FIRST_DENSE}|{_OTHERS_SPARSE}", experts="Q8_0")  # fmt: skip
    yield tiny("minicpm", ONE_WIDTH)
    yield tiny("minimax-01", ONE_WIDTH, {"residual_scale": 1.0, "full_attention_interval": 2,
                                         "expert_used_count": 2})  # fmt: skip
    yield tiny("minimax-m2", {"expert_gating_func": SIGMOID})
    yield tiny("minimax-m3", BIASED, INDEXER, {"attention.indexer.block_size": 8,
                                               "attention.indexer.local_blocks": 1})  # fmt: skip
    yield tiny("mistral3", ONE_WIDTH)
    yield tiny("mistral4", BIASED, LATENT_ATTENTION, {"expert_gating_func": SOFTMAX},
               drop="exp_probs_b")  # fmt: skip
    yield tiny("nemotron_h_moe", NEMOTRON, drop="ffn_latent_")
    yield tiny("nemotron_h_moe:latent", NEMOTRON, {"moe_latent_size": 64})
    yield tiny("nemotron_h_moe:puzzle", NEMOTRON,
               {"expert_used_count": [0, 4, 0, 2, 0, 6],
                "expert_feed_forward_length": [0, 64, 0, 96, 0, 32]}, drop="ffn_latent_")  # fmt: skip
    yield tiny("nomic-bert-moe", ONE_WIDTH, NO_CACHE, TWO_OF_EIGHT,
               {"block_count": 6, "moe_every_n_layers": 2, "pooling_type": 1})  # fmt: skip
    yield tiny("olmoe", ONE_WIDTH, {"attention.head_count_kv": 4}, experts="Q8_0")
    yield tiny("phimoe", ONE_WIDTH, {"expert_used_count": 2,
                                     "rope.scaling.original_context_length": 512}, experts="F16")  # fmt: skip
    yield tiny("qwen2moe", SHARED, keep=r"attn_[qkv]\.bias")
    yield tiny("qwen3moe")
    yield tiny("qwen3moe:all", {"expert_count": 4})
    yield tiny("qwen3moe:fused", fused=True)
    yield tiny("qwen3moe:scales", keep=r"_exps\.scale")
    yield tiny("qwen3moe:split", shards=3)
    for kind in ("F16", "BF16", "Q8_0"):
        yield tiny(f"qwen3moe:{kind} router", router=kind)
    for kind in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL",
                 "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"):  # fmt: skip
        yield tiny(f"qwen3moe:{kind}", K_QUANT, experts=kind)
    yield tiny("qwen3next", DELTA_NET, SHARED, drop=r"ssm_in\.")
    yield tiny("qwen3vlmoe", SECTIONS, {"n_deepstack_layers": 3})
    yield tiny("qwen35moe", DELTA_NET, SECTIONS, SHARED, fused=True)
    yield tiny("qwen4exp", QWEN4)
    yield tiny("qwen4exp:n-grams", QWEN4, NGRAMS)
    yield tiny("refact", ONE_WIDTH)
    yield tiny("rnd1", NO_CACHE)
    yield tiny("smallthinker", {"expert_gating_func": SIGMOID})
    yield tiny("smallthinker:window", WINDOW, {"expert_gating_func": SOFTMAX})
    yield tiny("step35", BIASED, EVERY_OTHER,
               {"rope.freq_base_swa": 1e4, "swiglu_clamp_exp": [0.0, 0.0, 0.0, 7.0],
                "swiglu_clamp_shexp": [0.0, 0.0, 0.0, 7.0]},
               drop=f"{_FIRST_DENSE}|{_OTHERS_SPARSE}")  # fmt: skip


MODELS: dict[str, Model] = dict(_models())


def unlisted(library: LlamaLibrary, folder: Path) -> dict[str, str]:
    """Architectures with experts that MODELS lacks, or of which that cannot be said: why."""
    found = {}
    for arch in set(library.architectures()) - {model.arch for model in MODELS.values()}:
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
    """All tensors that the architecture may have; `model.keys` gets what llama.cpp asks for."""
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
        norms = dict.fromkeys(("enorm", "hnorm"), [WIDTH])
        shapes |= {f"{prefix}nextn.{part}.weight": ne for part, ne in norms.items()}
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
            writer.add_tensor(tensor, _quantised(rng, quant, shape, std), raw_dtype=QuantType[quant])
    first: Path = writer.format_shard_names(path)[0]
    _finish(writer)
    return first


def _values(
    rng: np.random.Generator, model: Model, tensor: str, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Random weights that keep a hidden vector's size about the same from layer to layer."""

    def around(mean: float, std: float) -> npt.NDArray[np.float32]:
        return rng.normal(mean, std, shape).astype(np.float32)

    kind = _kind(tensor)
    if kind == "ffn_gate_tid2eid.weight":  # the experts of each token
        experts = int(model.keys["expert_count"])
        return np.stack([rng.permutation(experts)[: shape[-1]] for _ in range(shape[0])]).astype("i4")
    if kind == "ssm_a":
        return -np.abs(around(1.0, 0.3)) - np.float32(0.1)
    if kind == "ffn_gate_inp.scale":
        return around(sqrt(WIDTH), 0.5)
    if "hc_" in kind and "_scale" in kind:
        return around(0.5, 0.05)
    if kind == "ssm_d" or ("norm" in kind and kind.endswith("weight")):
        return around(1.0, 0.1)
    if kind.endswith(".scale") or "output_scale" in kind or kind.startswith("rope_"):
        return around(1.0, 0.1)
    if kind.endswith(".bias") or (len(shape) == 1 and not kind.endswith("shexp.weight")):
        return around(0.0, {"exp_probs_b.bias": 0.2, "attn_sinks.weight": 1.0}.get(kind, 0.1))
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
    quantise.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    block, nbytes = gguf.GGML_QUANT_SIZES[QuantType[quant]]
    rows, width = 256, shape[-1]
    values = rng.normal(0.0, std, (rows, width)).astype(np.float32)
    stored = np.zeros((rows, width // block * nbytes), np.uint8)
    even = np.ones(width, np.float32)  # how much each column matters
    pointers = [array.ctypes.data for array in (values, stored, even)]
    quantise(QuantType[quant], *pointers[:2], 0, rows, width, pointers[2])
    picked: npt.NDArray[np.uint8] = stored[rng.integers(0, rows, shape[:-1])]
    return picked
