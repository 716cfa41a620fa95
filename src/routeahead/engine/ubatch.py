"""How many rows of a prompt llama.cpp evaluates at once (its *ubatch*).

Each ubatch passes over all experts once, so a prompt that is one ubatch reads them once. What it
costs is llama.cpp's compute buffer, which grows with the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routeahead.config import Settings
from routeahead.experts.layout import MIB, ModelLayout
from routeahead.machine.memory import available_bytes

DEFAULT = 512
"""llama.cpp's own."""

MOST = 4096

_SHARE = 8
"""The buffer may take one part in so many of what is free beside the dense weights."""

_PAD = 256  # llama.cpp rounds a context up to a multiple of this


def batch_arguments(
    given: Mapping[str, Any], settings: Settings, layout: ModelLayout
) -> dict[str, int]:
    """`n_ubatch` and `n_batch` for `llama_cpp.Llama`; none if one of them was `given`.

    A resident model has llama.cpp's own, unless the settings give a number; so has one whose every
    row has an output, because logits take more memory than anything else.
    """
    rows = settings.ubatch
    if "n_batch" in given or "n_ubatch" in given:
        return {}
    if rows == "auto":
        if settings.resident or given.get("logits_all"):
            return {}
        free, size = available_bytes() - layout.dense_bytes, settings.cache_mb
        rows = ubatch_rows(
            layout,
            given.get("n_ctx", DEFAULT) or int(layout.value("context_length") or DEFAULT),
            free=free,
            cache=free if size == "auto" else size * MIB,
            flash_attention=bool(given.get("flash_attn")),
        )
    return {"n_ubatch": rows, "n_batch": rows}


def buffer_bytes(layout: ModelLayout, rows: int, context: int, *, flash_attention: bool) -> int:
    """Bytes of llama.cpp's compute buffer that a ubatch of `rows` writes to, at most about.

    Live at one time are, beside a few vectors of the model's width, either attention's queries,
    keys, values and (without flash attention) one score for each head and position of the context,
    or what the chosen experts made of each row. What is reserved for logits is not counted: only
    rows with an output are written.
    """
    width, heads = _largest(layout, "embedding_length"), _largest(layout, "attention.head_count")
    head = _largest(layout, "attention.key_length") or width // max(heads, 1)
    scores = 0 if flash_attention else context
    attention = heads * (4 * head + scores) + 2 * context  # masks: one for layers with a window
    hidden = _largest(layout, "expert_feed_forward_length") or _largest(
        layout, "feed_forward_length"
    )
    experts = layout.n_expert_used * (3 * hidden + 2 * width)
    dense = 3 * _largest(layout, "feed_forward_length")
    return 4 * rows * (max(attention, experts, dense) + 4 * width)


def ubatch_rows(
    layout: ModelLayout, context: int, *, free: int, cache: int, flash_attention: bool = False
) -> int:
    """As many rows as the context and the `free` bytes allow, between `DEFAULT` and `MOST`.

    Where the cache, of `cache` bytes, has room for all experts, a second ubatch reads nothing, and
    `DEFAULT` it is.
    """
    if cache >= layout.expert_bytes:
        return DEFAULT
    context = -(-context // _PAD) * _PAD
    rows = MOST
    while rows > DEFAULT and (
        rows >= 2 * context
        or buffer_bytes(layout, rows, context, flash_attention=flash_attention) > free // _SHARE
    ):
        rows //= 2
    return rows


def _largest(layout: ModelLayout, key: str) -> int:
    """A number of the model's, or that of the layer where it is largest; 0 if there is none."""
    value = layout.value(key)
    if isinstance(value, list):
        return max((int(one) for one in value), default=0)
    return int(value or 0)
