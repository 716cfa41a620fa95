"""Where a model's memory goes here, and what is left for experts and for a longer context."""

from __future__ import annotations

from dataclasses import dataclass

from routeahead.config import Settings
from routeahead.engine.budget import HEADROOM
from routeahead.experts.layout import MIB, ModelLayout


@dataclass(frozen=True)
class Memory:
    """Bytes by part.

    Attributes:
        free: that this process may take, before it loads anything.
        dense: weights that every token uses.
        kv: the KV cache of the context.
        compute: llama.cpp's other buffers.
        process: Python and its libraries.
        prompt: one layer's experts, which a prompt takes beyond the cache.
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
        return self.free > self.dense + self.kv + HEADROOM + self.prompt


def divide(
    layout: ModelLayout,
    settings: Settings,
    *,
    free: int,
    dense: int,
    buffers: dict[str, int],
    context: int,
    process: int,
) -> Memory:
    """Divides what is free as a run does (`engine.budget`)."""
    kv = buffers.get("KV", 0) + buffers.get("RS", 0)
    others = sum(size for name, size in buffers.items() if name in ("compute", "output"))
    prompt, least = layout.layer_bytes(), layout.token_bytes(settings.n_expert_used)
    left = free - dense - HEADROOM - prompt
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
        compute=others,
        process=process,
        prompt=prompt,
        cache=0 if cache < least and not settings.force_cache else cache,
        least=least,
        experts=layout.expert_bytes,
        context=context,
        context_room=longest,
    )
