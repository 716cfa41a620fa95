"""Where a model's memory goes here, and what is left for experts and for a longer context."""

from __future__ import annotations

from dataclasses import dataclass

from routeahead.config import Settings
from routeahead.engine.budget import HEADROOM
from routeahead.engine.ubatch import DEFAULT, buffer_bytes
from routeahead.engine.window import WINDOW
from routeahead.experts.layout import MIB, ModelLayout


@dataclass(frozen=True)
class Memory:
    """Bytes by part.

    Attributes:
        free: that this process may take, before it loads anything.
        dense: weights that every token uses.
        kv: the KV cache of the context.
        compute: of llama.cpp's other buffers, what a prompt writes to.
        process: Python and its libraries.
        prompt: one layer's experts, which a prompt takes beyond the cache, and what is read ahead.
        smallest: what all of it takes with no cache and nothing read ahead.
        cache: experts, as the settings or the free memory have it; 0 if there is no room.
        least: of the experts that one token routes to.
        experts: all of them.
        context: tokens for which `kv` is.
        context_room: tokens for which the KV cache would leave one token's experts room; at most
            what the model was trained for. None if it keeps nothing of a token.
    """

    free: int
    dense: int
    kv: int
    compute: int
    process: int
    prompt: int
    smallest: int
    cache: int
    least: int
    experts: int
    context: int
    context_room: int | None

    @property
    def total(self) -> int:
        parts = (self.dense, self.kv, self.compute, self.process, self.prompt, self.cache)
        return sum(parts)

    @property
    def share(self) -> float:
        """Share of all experts that the cache holds."""
        return min(1.0, self.cache / self.experts)

    @property
    def fits(self) -> bool:
        """Whether it runs: with no cache too, if everything else has room."""
        return self.free > self.smallest


def divide(
    layout: ModelLayout,
    settings: Settings,
    *,
    free: int,
    dense: int,
    buffers: dict[str, int],
    context: int,
    rows: int,
    process: int,
) -> Memory:
    """Divides what is free as a run does (`engine.budget`, `engine.streamed_model`).

    Args:
        buffers: what llama.cpp allocated; empty if it has not been asked.
        context: tokens.
        rows: of a prompt that are evaluated at once.
    """
    kv = buffers.get("KV", 0) + buffers.get("RS", 0)
    written = buffer_bytes(layout, rows, context, flash_attention=False)
    usual = buffer_bytes(layout, DEFAULT, context, flash_attention=False)
    more = max(0, written - usual)  # the headroom has room for the usual
    layer, least = layout.layer_bytes(), layout.token_bytes(settings.n_expert_used)
    smallest = dense + kv + HEADROOM + layer
    ahead = max(0, min(layer, WINDOW, (free - dense - kv - layer - more) // 8))
    left = free - dense - HEADROOM - layer - ahead - more
    chosen = settings.cache_mb
    room = max(0, left - kv)
    wanted = layout.expert_bytes if chosen == "auto" else int(chosen) * MIB
    cache = min(wanted, room, layout.expert_bytes)
    trained = int(layout.value("context_length") or context)
    longest = None
    if kv:
        longest = max(0, min(trained, int((left - least) * context / kv)))
    return Memory(
        free=free,
        dense=dense,
        kv=kv,
        compute=min(written, buffers.get("compute", 0)) + buffers.get("output", 0),
        process=process,
        prompt=layer + ahead,
        smallest=smallest,
        cache=0 if cache < least and not settings.force_cache else cache,
        least=least,
        experts=layout.expert_bytes,
        context=context,
        context_room=longest,
    )
