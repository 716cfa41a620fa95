"""What the page and the metrics show: copies that the evaluation thread makes and others read."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from routeahead.engine.llama import Llama
from routeahead.telemetry.counters import Totals

INTERVAL_S = 0.25  # between two copies while a job runs
WATCHED_S = 3.0  # a page that has not asked for so long is closed


@dataclass(frozen=True)
class Snapshot:
    """The stream at one moment. Nobody changes it.

    Attributes:
        cache: expert bytes in the cache and its limit, evictions and re-reads; empty if the model
            is resident.
        idle_bytes: read by lanes that nobody waited for, to fill the cache; in no other figure.
        residency: MoE layer → a character an expert, "1" if it is in memory; empty unless a page
            asked for it.
        agreement: layer → share of committed slots that the router would have chosen; empty without
            route-ahead.
    """

    prefill: Totals
    decode: Totals
    cache: dict[str, int]
    idle_bytes: int
    residency: dict[int, str]
    agreement: dict[int, float]


class Live:
    """The latest snapshot.

    `offer` belongs to the evaluation thread; the others may be called from any thread, because each
    reads or writes one attribute.
    """

    def __init__(self, llm: Llama) -> None:
        self._next = self._watched = 0.0
        self.latest = self._copy(llm, residency=False)

    def watch(self) -> Snapshot:
        """The latest snapshot; later ones will have the residency too."""
        self._watched = time.monotonic() + WATCHED_S
        return self.latest

    def offer(self, llm: Llama, *, force: bool = False) -> None:
        """Copies what is shown, if the last copy is old enough and the thread that watches memory
        does not have the cache; or in any case."""
        now = time.monotonic()
        if now < self._next and not force:
            return

        def copy() -> None:
            self._next = now + INTERVAL_S
            self.latest = self._copy(llm, residency=now < self._watched)

        if force or llm.streamed is None:
            copy()
        else:
            llm.streamed.ownership.borrow(copy)

    @staticmethod
    def _copy(llm: Llama, *, residency: bool) -> Snapshot:
        source = llm.source
        layers = llm.layout.moe_layers if source and residency else []
        experts = range(llm.layout.n_expert)
        ahead = llm.policies.report(llm.counters.decode).get("route_ahead", {})
        return Snapshot(
            replace(llm.counters.prefill),
            replace(llm.counters.decode),
            {
                "used": source.cache.used,
                "budget": source.cache.budget,
                "evictions": source.cache.evictions,
                "rereads": source.cache.rereads,
            }
            if source
            else {},
            source.lanes.idle_bytes if source else 0,
            {
                layer: "".join("1" if source.cached(layer, e) else "0" for e in experts)
                for layer in layers
                if source
            },
            {
                int(layer): counts["agreed_slots"] / counts["slots"]
                for layer, counts in ahead.get("by_layer", {}).items()
                if counts["slots"]
            },
        )


def as_dict(snapshot: Snapshot) -> dict[str, Any]:
    """As JSON for the page."""
    return {
        "prefill": {**vars(snapshot.prefill), "compute_s": snapshot.prefill.compute_s},
        "decode": {
            **vars(snapshot.decode),
            "tokens": snapshot.decode.kept,
            "compute_s": snapshot.decode.compute_s,
        },
        "cache": snapshot.cache,
        "idle_bytes": snapshot.idle_bytes,
        "residency": snapshot.residency,
        "agreement": snapshot.agreement,
    }
