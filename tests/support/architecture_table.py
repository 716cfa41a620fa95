"""Descriptions of a tiny model of every architecture with experts: its metadata, and what llama.cpp
cannot tell of it. `support.architectures` writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.llama_library import Shapes
from support.models import VOCABULARY

Keys = dict[str, Any]

LAYERS, WIDTH, DENSE, INNER, EXPERTS, TOP_K = 4, 128, 160, 64, 16, 4
SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 1, 2, 4  # llama.cpp's gating functions

PLAIN: Keys = {
    "vocab_size": len(VOCABULARY), "context_length": 512, "block_count": LAYERS,
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


def _tiny(name: str, *parts: Keys, **options: Any) -> tuple[str, Model]:
    keys = dict(PLAIN)
    for part in parts:
        keys.update(part)
    keys = {key: value for key, value in keys.items() if value is not None}
    return name, Model(name.partition(":")[0], keys, **options)


# fmt: off
MODELS: dict[str, Model] = dict([
    _tiny("afmoe", BIASED, WINDOW),
    _tiny("arctic", ONE_WIDTH, {"expert_used_count": 2}),
    _tiny(
        "bailingmoe", BIASED, {"leading_dense_block_count": None, "expert_gating_func": None}
    ),
    _tiny("bailingmoe2", BIASED, GROUPS),
    _tiny("bailingmoe2:further", BIASED, GROUPS, further=1,
          more={f"blk.{LAYERS}.layer_output_norm.weight": [WIDTH]}),
    _tiny("bailingmoe3", BIASED, KIMI),
    _tiny("cohere2moe", BIASED, WINDOW,
          {"logit_scale": 0.25, "attention.layer_norm_rms_epsilon": None}),
    _tiny("dbrx", ONE_WIDTH, {"attention.clamp_kqv": 8.0}),
    _tiny("deci", ONE_WIDTH),
    _tiny("deepseek", BIASED, {"expert_weights_norm": None, "expert_gating_func": None,
                               "expert_weights_scale": 1.0}),
    _tiny("deepseek2", BIASED, LATENT_ATTENTION),
    _tiny("deepseek2:fused", BIASED, LATENT_ATTENTION, fused=True),
    _tiny("deepseek2:grouped", BIASED, LATENT_ATTENTION, GROUPS),
    _tiny("deepseek2:softmax", BIASED, LATENT_ATTENTION,
          {"expert_gating_func": SOFTMAX, "expert_weights_norm": False,
           "expert_weights_scale": 16.0, "expert_shared_count": 2}, drop="exp_probs_b"),
    _tiny("deepseek2-ocr", BIASED, {"expert_gating_func": SOFTMAX,
                                    "attention.head_count_kv": 4}, drop="exp_probs_b"),
    _tiny("deepseek32", BIASED, LATENT_ATTENTION, INDEXER, GROUPS),
    _tiny("deepseek4", DEEPSEEK4, drop="exp_probs_b_vl"),
    _tiny("deepseek4:table3", DEEPSEEK4, SIX_LAYERS, {"hash_layer_count": 3},
          drop="exp_probs_b_vl"),
    _tiny("deepseek4:no table", DEEPSEEK4, {"hash_layer_count": 0}, drop="exp_probs_b_vl"),
    _tiny("dflash", OUTPUT_GROUPS, {"target_layers": [0, 1]}),
    _tiny("dots1", BIASED, {"attention.head_count_kv": 4}, experts="F16"),
    _tiny("dots3note", BIASED, LATENT_ATTENTION, INDEXER, EVERY_OTHER,
          {"attention.kv_lora_rank": 48, "attention.kv_lora_rank_swa": 48,
           "attention.key_length": 64, "attention.key_length_swa": 64,
           "attention.value_length": 48, "attention.key_length_mla_swa": 32,
           "attention.value_length_mla_swa": 32, "rope.freq_base_swa": 1e4,
           "attention.indexer.types": [1] * 4}),
    _tiny("ernie4_5-moe", BIASED, {"expert_gating_func": None, "interleave_moe_layer_step": 1}),
    _tiny("exaone-moe", BIASED, WINDOW, GROUPS),
    _tiny("gemma4", WINDOW,
          {"attention.sliding_window_pattern": [True, True, False, True],
           "attention.key_length": 64, "attention.value_length": 64,
           "attention.key_length_swa": 32, "attention.value_length_swa": 32,
           "rope.dimension_count": 64, "rope.dimension_count_swa": 32,
           "rope.freq_base_swa": 1e4, "embedding_length_per_layer_input": 0,
           "final_logit_softcapping": 30.0},
          keep=r"down_exps\.scale|gate_inp\.scale|output_scale|rope_freqs",
          experts="Q8_0", fused=True),
    _tiny("glm-dsa", BIASED, LATENT_ATTENTION, INDEXER),
    _tiny("glm4moe", BIASED, SECTIONS, experts="Q8_0"),
    _tiny("glm4moe:further", BIASED, SECTIONS, experts="Q8_0", further=1),
    _tiny("glm5-next", BIASED, KIMI, STREAMS, INDEXER,
          {"attention.indexer.kpool": 4, "rope.dimension_count": 0,
           "attention.key_length": 32}),
    _tiny("gpt-oss", WINDOW, experts="MXFP4"),
    _tiny("granite", GRANITE),
    _tiny("granite_swa", GRANITE, EVERY_OTHER),
    _tiny("granitehybrid", GRANITE, SHARED, MAMBA,
          {"ssm.group_count": 1, "attention.head_count_kv": [0, 2, 0, 2]}),
    _tiny("granitemoe", GRANITE),
    _tiny("granitemoe:shared", GRANITE, SHARED),
    _tiny("graniteswitch", GRANITE,
          {"adapters.count": 2, "adapters.lora_rank": 8,
           "adapters.token_ids_activate": [10, 11],
           "adapters.token_ids_substitute": [12, 13]}),
    _tiny("grok", TWO_OF_EIGHT,
          {"router_logit_softcapping": 30.0, "attn_logit_softcapping": 30.0,
           "final_logit_softcapping": 30.0}, experts="Q8_0"),
    _tiny("grovemoe", {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.05,
                       "experts_per_group": 2}),
    _tiny("hunyuan-moe", SHARED),
    _tiny("hy_v3", BIASED),
    _tiny("hy_v4", BIASED, LATENT_ATTENTION, STREAMS, INDEXER,
          {"attention.indexer.types": [1] * 4}),
    _tiny("jamba", ONE_WIDTH, MAMBA,
          {"block_count": 6, "expert_used_count": 2,
           "attention.head_count_kv": [0, 2, 0, 2, 0, 2]},
          drop=r"blk\.[024]\.ffn_(gate_inp|(gate|up|down)_exps)\.", experts="Q8_0",
          more={f"blk.{layer}.ffn_{part}.weight":
                [INNER, WIDTH] if part == "down" else [WIDTH, INNER]
                for layer in (0, 2, 4) for part in ("gate", "up", "down")}),
    _tiny("kimi-k3", BIASED, KIMI,
          {"attn_res_block_size": 2, "attn_res.block_size": 2, "expert_latent_length": 64,
           "activation.situ_beta": 4.0, "activation.situ_linear_beta": 4.0}),
    _tiny("kimi-linear", BIASED, KIMI),
    _tiny("laguna", BIASED, WINDOW),
    _tiny("lfm2moe", {"shortconv.l_cache": 3, "expert_gating_func": SIGMOID,
                      "leading_dense_block_count": 1,
                      "attention.head_count_kv": [0, 2, 0, 2]}),
    _tiny("llada-moe", NO_CACHE),
    _tiny("llama", ONE_WIDTH),
    _tiny("llama-embed", ONE_WIDTH, NO_CACHE, {"pooling_type": 1}),
    _tiny("llama4", {"interleave_moe_layer_step": 1, "expert_used_count": 1}),
    _tiny("llama4:interleaved", WINDOW, {"interleave_moe_layer_step": 2, "block_count": 6,
                                         "expert_used_count": 1}),
    _tiny("llama4:top4", {"interleave_moe_layer_step": 1}),
    _tiny("maple", EVERY_OTHER, {"swiglu_clamp_exp": [7.0] * 4}),
    _tiny("mellum", WINDOW),
    _tiny("mimo2", EVERY_OTHER, {"rope.freq_base_swa": 1e4, "expert_gating_func": SIGMOID},
          drop=f"{_FIRST_DENSE}|{_OTHERS_SPARSE}", experts="Q8_0"),
    _tiny("minicpm", ONE_WIDTH),
    _tiny("minimax-01", ONE_WIDTH, {"residual_scale": 1.0, "full_attention_interval": 2,
                                    "expert_used_count": 2}),
    _tiny("minimax-m2", {"expert_gating_func": SIGMOID}),
    _tiny("minimax-m3", BIASED, INDEXER, {"attention.indexer.block_size": 8,
                                          "attention.indexer.local_blocks": 1}),
    _tiny("mistral3", ONE_WIDTH),
    _tiny("mistral4", BIASED, LATENT_ATTENTION, {"expert_gating_func": SOFTMAX},
          drop="exp_probs_b"),
    _tiny("nemotron_h", NEMOTRON, drop="ffn_latent_"),
    _tiny("nemotron_h_moe", NEMOTRON, drop="ffn_latent_"),
    _tiny("nemotron_h_moe:latent", NEMOTRON, {"moe_latent_size": 64}),
    _tiny("nemotron_h_moe:puzzle", NEMOTRON,
          {"expert_used_count": [0, 4, 0, 2, 0, 6],
           "expert_feed_forward_length": [0, 64, 0, 96, 0, 32]}, drop="ffn_latent_"),
    _tiny("nomic-bert-moe", ONE_WIDTH, NO_CACHE, TWO_OF_EIGHT,
          {"block_count": 6, "moe_every_n_layers": 2, "pooling_type": 1}),
    _tiny("olmoe", ONE_WIDTH, {"attention.head_count_kv": 4}, experts="Q8_0"),
    _tiny("phimoe", ONE_WIDTH,
          {"expert_used_count": 2, "rope.scaling.original_context_length": 512},
          experts="F16"),
    _tiny("qwen2moe", SHARED, keep=r"attn_[qkv]\.bias"),
    _tiny("qwen3moe"),
    _tiny("qwen3moe:all", {"expert_count": 4}),
    _tiny("qwen3moe:fused", fused=True),
    _tiny("qwen3moe:scales", keep=r"_exps\.scale"),
    _tiny("qwen3moe:split", shards=3),
    *(_tiny(f"qwen3moe:{kind} router", router=kind)
      for kind in ("F16", "BF16", "Q8_0")),
    *(_tiny(f"qwen3moe:{kind}", K_QUANT, experts=kind)
      for kind in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL",
            "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0")),
    _tiny("qwen3next", DELTA_NET, SHARED, drop=r"ssm_in\."),
    _tiny("qwen3vlmoe", SECTIONS, {"n_deepstack_layers": 3}),
    _tiny("qwen35moe", DELTA_NET, SECTIONS, SHARED, fused=True),
    _tiny("qwen4exp", QWEN4),
    _tiny("qwen4exp:n-grams", QWEN4, NGRAMS),
    _tiny("refact", ONE_WIDTH),
    _tiny("rnd1", NO_CACHE),
    _tiny("smallthinker", {"expert_gating_func": SIGMOID}),
    _tiny("smallthinker:window", WINDOW, {"expert_gating_func": SOFTMAX}),
    _tiny("step35", BIASED, EVERY_OTHER,
          {"rope.freq_base_swa": 1e4, "swiglu_clamp_exp": [0.0, 0.0, 0.0, 7.0],
           "swiglu_clamp_shexp": [0.0, 0.0, 0.0, 7.0]},
          drop=f"{_FIRST_DENSE}|{_OTHERS_SPARSE}"),
])
# fmt: on

# Plain metadata do not make a model of these. None has experts.
WITHOUT_EXPERTS = {
    "apertus", "clip", "cohere2", "eagle3", "gemma4-assistant", "gptj", "gptneox", "hrm_text",
    "mamba", "muse-glimmer", "qwen2vl", "qwen35", "qwen3tts", "qwen3vl", "rwkv7", "spark2_5",
    "talkie", "wavtokenizer-dec",
}  # fmt: skip
