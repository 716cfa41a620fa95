"""The keyword arguments of `routeahead.Llama`, for type checkers.

Written by `tests/support/arguments.py` from the fields of `routeahead.Settings` and from the
constructor of `llama_cpp.Llama`: not to be edited. Nothing imports it at run time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict

from llama_cpp.llama_chat_format import LlamaChatCompletionHandler
from llama_cpp.llama_speculative import LlamaDraftModel
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer


class StreamingArguments(TypedDict, total=False):
    """The fields of `routeahead.Settings`."""

    # Expert cache in MiB, or as 4G; 'auto' sizes it from free memory, 0 keeps nothing.
    cache_mb: int | Literal["auto"]
    # Read ahead what the previous token routed to in the next K MoE layers; 0 is off.
    prefetch: int
    # Raise resident experts' selection scores by M times the token's score range (lossy); 0 is off.
    expert_substitute: float
    # Route as this recorded trace did (random weights, real locality).
    replay_routing: str | Path | None
    # Predict in the graph's callback ('inline'), on a thread of its own ('worker'), or, with
    # route_ahead, by the graph's own router products ('graph').
    route_ahead_compute: Literal["inline", "worker", "graph"]
    # Router matrices that predict: 'f32' (the model's own), 'f16' or 'int8'.
    router_precision: Literal["f32", "f16", "int8"]
    # Read ahead what the next layer's router says of this layer's input.
    predict_prefetch: bool
    # With predict_prefetch: missing experts to read a layer at most; 0 only keeps what is there.
    predict_spec_max: int
    # Commit each decode layer's experts N MoE layers early, so that they are read in time (lossy);
    # 0.5: from what the layer's own attention is given; 0 is off.
    route_ahead: float
    # A prediction that is late is waited for ('wait', so that the output does not depend on timing)
    # or left to the router ('pass').
    route_ahead_late: Literal["pass", "wait"]
    # A committed expert's weight: its own router's ('true'), or what was predicted with it
    # ('predicted', which spares route_ahead_compute='graph' the products).
    route_ahead_weights: Literal["true", "predicted"]
    # Predict nothing from the first K MoE layers, which know least of what is to come.
    route_ahead_skip: int
    # Leave a layer to its router where that agrees with less than this share of the predicted
    # slots, by the calibration's or the run's own count; what is predicted is a guess there.
    route_ahead_min_agreement: float
    # Read M more of the predicted experts than a layer uses (fewer, if M is negative), and let its
    # own router choose among them and what the cache has.
    route_ahead_candidates: int | None
    # Predict by the matrices that `routeahead calibrate` fitted to this model.
    route_ahead_gates: str | Path | None
    # Score how well routings could have been predicted; changes nothing, and is slow.
    predict_log: bool
    # Do not read a missing expert whose share of the routing is below F / top-k (lossy); 0 is off.
    drop_cold_experts: float
    # With drop_cold_experts: scale the others' weights to the routing's mass.
    drop_renorm: bool
    # With drop_cold_experts: in prompts too.
    drop_in_prefill: bool
    # With drop_cold_experts: do not read early what a prediction says will be dropped.
    drop_aware: bool
    # Load everything and stream nothing: the reference to compare with.
    resident: bool
    # Allow a cache smaller than what one token routes to.
    force_cache: bool
    # Size in MiB below which the cache does not shrink when other programs need memory.
    cache_floor_mb: int | None
    # Which experts leave a full cache: 'decay' (those that recent routings make least likely) or
    # 'lru' (the least recently used).
    cache_policy: Literal["lru", "decay"]
    # While the cache has room, read the experts that the last runs used most when lanes are idle.
    fill_cache: bool | None
    # Lanes: threads that read experts.
    io_threads: int
    # Rows of a prompt that are evaluated at once, and read experts once. 'auto' takes as many as
    # context and memory allow, up to 4096.
    ubatch: int | Literal["auto"]
    # Read later projections while earlier ones compute.
    overlap: bool
    # Dense weights: 'anon' (read once, never dropped) or 'mmap' (mapped lazily).
    dense: Literal["anon", "mmap"]
    # Read experts past the page cache (O_DIRECT); buffered if that is refused.
    direct_io: bool
    # Compare what is read with the checksums that `routeahead checksum` wrote.
    verify_reads: bool
    # Experts a token routes to in each layer, instead of the model's (lossy).
    n_expert_used: int | None
    # Layers whose dense weights go to a device (docs/gpu.md): a number, 'auto' for what fits there,
    # or 'all'; experts stay in memory.
    n_gpu_layers: int | Literal["auto", "all"]
    # Guess up to N tokens from what the text has said before, and verify them in one batch; 0 is
    # off.
    lookup: int
    # A policy of your own (docs/policy-api.md); may be given several times.
    policy: tuple[str, ...]
    # Read at most this many MiB/s in all, as a slower disk; 0 is unthrottled.
    throttle: float
    # With throttle: delay of each read.
    throttle_latency_ms: float


class Arguments(StreamingArguments, total=False):
    """And what `llama_cpp.Llama` takes."""

    split_mode: int
    main_gpu: int
    tensor_split: list[float] | None
    vocab_only: bool
    use_mmap: bool
    use_mlock: bool
    kv_overrides: dict[str, bool | int | float | str] | None
    seed: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    n_threads_batch: int | None
    rope_scaling_type: int | None
    pooling_type: int
    attention_type: int
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    logits_all: bool
    embedding: bool
    offload_kqv: bool
    flash_attn: bool
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool
    last_n_tokens_size: int
    lora_base: str | None
    lora_scale: float
    lora_path: str | None
    numa: bool | int
    chat_format: str | None
    chat_handler: LlamaChatCompletionHandler | None
    draft_model: LlamaDraftModel | None
    tokenizer: BaseLlamaTokenizer | None
    type_k: int | None
    type_v: int | None
    spm_infill: bool
    verbose: bool
