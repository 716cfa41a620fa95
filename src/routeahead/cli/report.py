"""A run as JSON (`--report`) and as the lines that `run` prints."""

from __future__ import annotations

from typing import Any

from routeahead.engine.llama import Llama
from routeahead.experts.layout import MIB
from routeahead.experts.load import Prefetch
from routeahead.experts.source import ExpertSource
from routeahead.llamacpp.devices import devices
from routeahead.telemetry.counters import peak_rss_bytes, share


def counters(llm: Llama, first_token_s: float, total_s: float) -> dict[str, float | int]:
    """Figures of a run; per-token ones over decode only (definitions: `telemetry.counters`)."""
    decode, prefill = llm.counters.decode, llm.counters.prefill
    cache = llm.source.cache if llm.source else None
    ahead = llm.source.ahead if llm.source else Prefetch()
    filled = llm.source.filling.counts if llm.source and llm.source.filling else Prefetch()
    return {
        "bytes_read": prefill.bytes_read + decode.bytes_read,
        "reads": prefill.reads + decode.reads,
        "hits": prefill.hits + decode.hits,
        "misses": prefill.misses + decode.misses,
        "evictions": cache.evictions if cache else 0,
        "rereads": cache.rereads if cache else 0,
        "cache_bytes": cache.budget if cache else 0,
        "cache_least_bytes": llm.streamed.budget.least if llm.streamed else 0,
        "cache_resizes": llm.streamed.budget.resizes if llm.streamed else 0,
        "load_s": llm.counters.load_s,
        "first_token_s": first_token_s,
        "total_s": llm.counters.load_s + total_s,
        "prompt_tok_per_s": prefill.tokens / prefill.wall_s if prefill.tokens else 0.0,
        "s_per_token": decode.per_token("wall_s"),
        "compute_s_per_token": decode.per_token("compute_s"),
        "stall_s_per_token": decode.per_token("stall_s"),
        "io_s_per_token": decode.per_token("io_s"),
        "mgmt_s_per_token": decode.per_token("mgmt_s"),
        "cpu_s_per_token": decode.per_token("cpu_s"),
        "bytes_per_token": decode.per_token("bytes_read"),
        "drafts": decode.drafts,
        "draft_bytes": decode.draft_bytes,
        "drafted": decode.drafted,
        "accepted": decode.accepted,
        "decode_hits": decode.hits,
        "decode_misses": decode.misses,
        "prefill_compute_s": prefill.compute_s,
        "ahead_bytes": llm.source.lanes.ahead_bytes if llm.source else 0,
        "ahead_unused": ahead.completed - ahead.useful,
        "filled_bytes": llm.source.lanes.idle_bytes if llm.source else 0,
        "filled_experts": filled.completed,
        "filled_used": filled.useful,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def model(llm: Llama) -> dict[str, Any]:
    layout = llm.layout
    return {
        "path": str(layout.shards[0].path),
        "arch": layout.arch,
        "moe_layers": len(layout.moe_layers),
        "experts": layout.n_expert,
        "top_k": layout.n_expert_used,
        "file_bytes": layout.file_bytes,
        "dense_bytes": layout.dense_bytes,
        "expert_bytes": layout.expert_bytes,
    }


def device(llm: Llama) -> dict[str, Any]:
    """What is on a device, with what is free there now; empty if nothing is."""
    if not llm.offload.layers:
        return {}
    return {"device": llm.offload.as_dict(llm.layout, devices())}


def policies(llm: Llama) -> dict[str, Any]:
    """What the policies report, and what became of the experts that they read early."""
    found = llm.policies.report(llm.counters.decode)
    if llm.source and llm.policies.reads_early:
        found["prefetch"] = {
            "source": llm.policies.reads_early,
            **vars(llm.source.prefetch),
            "bytes": llm.source.lanes.early_bytes,
        }
    return found


def lines(llm: Llama, figures: dict[str, float | int], prompt: int, generated: int) -> list[str]:
    """How fast it went, where the time of a token went, what the cache did, what overlap hid; then
    what the policies did.

    `prompt` and `generated` are tokens. What is counted for a decoded token is left out if there
    is none: the first token is the prompt's.
    """
    decode, peak = llm.counters.decode, int(figures["peak_rss_bytes"]) // MIB
    token_s, source = decode.per_token("wall_s"), llm.source
    rate = f" ({1 / token_s:.1f} tok/s)" if decode.tokens else ""
    found = [
        f"{'moe-stream' if source else 'resident'}: "
        f"prompt {prompt} tokens ({figures['prompt_tok_per_s']:.1f} tok/s), "
        f"output {generated} {'token' if generated == 1 else 'tokens'}{rate}",
        f"moe-process: load {figures['load_s']:.2f} s, total {figures['total_s']:.2f} s, "
        f"peak {peak} MiB",
        *_device_line(llm),
    ]
    if decode.tokens:
        parts = {name: f"{1e3 * decode.per_token(f'{name}_s'):.1f}" for name in _PARTS}
        found.append(
            f"moe-token: {1e3 * token_s:.1f} ms: compute {parts['compute']}, "
            f"stall {parts['stall']}, management {parts['mgmt']}"
        )
    if source is None:
        return [*found, *_draft_lines(llm)]
    resizes, least = figures["cache_resizes"], int(figures["cache_least_bytes"]) // MIB
    resized = f" (memory was short: resized {resizes} times, least {least})" if resizes else ""
    found.append(f"moe-cache: {source.cache.budget // MIB} MiB{resized}, {_cache(llm, figures)}")
    if decode.tokens:
        io_ms = 1e3 * decode.per_token("io_s")
        stall_ms = 1e3 * decode.per_token("stall_s")
        hidden = max(0.0, io_ms / llm.settings.io_threads - stall_ms)
        found.append(
            f"moe-overlap: {'on' if llm.settings.overlap else 'off'}, "
            f"{llm.settings.io_threads} lanes{'' if llm.direct_io else ' (buffered)'}: "
            f"{io_ms:.1f} ms of lane time a token, at least {hidden:.1f} ms hidden"
        )
    if source.filling:
        found.append(
            f"moe-fill: {source.lanes.idle_bytes // MIB} MiB read by idle lanes; "
            f"{figures['filled_used']}/{figures['filled_experts']} experts used"
        )
    return [
        *found,
        *_draft_lines(llm),
        *llm.policies.lines(decode),
        *_early_lines(source, llm.policies.reads_early),
    ]


def _device_line(llm: Llama) -> list[str]:
    """Whose layers are where: the peak above is of host memory alone."""
    if not llm.offload.layers:
        return []
    there = llm.offload.device_bytes(llm.layout) // MIB
    here = llm.offload.host_bytes(llm.layout) // MIB
    free = ", ".join(f"{one.name} has {one.free // MIB} MiB free" for one in devices())
    return [
        f"moe-device: {llm.offload.describe()}: {there} MiB of dense weights and the KV cache of "
        f"these blocks there, {here} MiB here; {free}"
    ]


_PARTS = ("compute", "stall", "mgmt")


def _cache(llm: Llama, figures: dict[str, float | int]) -> str:
    """What was found in it and read into it: a token's, or the prompt's if there is no other."""
    decode, kept = llm.counters.decode, f"{figures['evictions']} evictions"
    if not decode.tokens:
        read = int(figures["bytes_read"]) // MIB
        return f"prompt read {read} MiB in {figures['reads']} reads; {kept}"
    return (
        f"{share(decode.hits, decode.hits + decode.misses)} hits; "
        f"{decode.per_token('bytes_read') / MIB:.1f} MiB a token in "
        f"{decode.per_token('reads'):.1f} reads; {kept}, {figures['rereads']} re-reads"
    )


def _draft_lines(llm: Llama) -> list[str]:
    """What guessed tokens cost and brought, if any were guessed."""
    if not llm.draft_model:
        return []
    decode = llm.counters.decode
    line = (
        f"moe-draft: {decode.accepted}/{decode.drafted} guessed tokens right "
        f"({share(decode.accepted, decode.drafted)}) in {decode.drafts} batches"
    )
    kept, others = decode.drafts + decode.accepted, decode.batches - decode.drafts
    if llm.source and decode.drafts:
        line += f"; {decode.draft_bytes / kept / MIB:.2f} MiB a token there"
        if others:
            apart = (decode.bytes_read - decode.draft_bytes) / others / MIB
            line += f", {apart:.2f} in the {others} others"
    return [line]


def _early_lines(source: ExpertSource, made_by: str) -> list[str]:
    """What was read before its layer asked, if a policy does that."""
    if not made_by:
        return []
    early, mib = source.prefetch, source.lanes.early_bytes // MIB
    return [
        f"moe-prefetch: {mib} MiB ahead, {early.useful}/{early.issued} experts useful "
        f"({share(early.useful, early.issued)}); when their layer came, "
        f"{share(early.completed, early.issued)} were begun and "
        f"{share(early.landed, early.issued)} there [{made_by}]"
    ]
