"""Prompts of several passes over the layers: what the cache saves, and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import models
from support.library import evaluate, with_budget

from routeahead import Llama
from routeahead.engine import streamed_model
from routeahead.engine.budget import FIXED_HEADROOM
from routeahead.experts import cache, slots
from routeahead.experts.cache import Outcome
from routeahead.experts.layout import MIB
from routeahead.experts.slot_table import SlotTable
from routeahead.replay.eviction import Policy, make_cache
from routeahead.telemetry.recorder import Outputs
from routeahead.telemetry.route_trace import read_trace
from routeahead.types import CachePolicy

if TYPE_CHECKING:
    from support.machine import Machine

pytest_plugins = ["support.machine"]

Load = Callable[..., Llama]
NAME, UBATCH, PASSES = "qwen3moe", 60, 3
SPEC = models.FIXTURES[NAME]


def prompt(seed: int) -> list[list[int]]:
    """A prompt of several ubatches, then two tokens."""
    tokens = np.random.default_rng(seed).integers(3, 259, size=PASSES * UBATCH + 2).tolist()
    return [tokens[:-2], *([token] for token in tokens[-2:])]


def reads_of(llm: Llama, made: list[list[int]]) -> None:
    """Has `made` get the experts that each pass over the layers misses, layer by layer."""
    own, first = llm.source.cache, llm.layout.moe_layers[0]
    lookup = own.lookup

    def counted(layer: int, experts: Sequence[int], rows: np.ndarray | None = None) -> Outcome:
        outcome = lookup(layer, experts, rows)
        if layer == first:
            made.append([])
        if len(experts):
            made[-1].append(len(outcome.misses))
        return outcome

    own.lookup = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("share", [0.2, 0.45])
@pytest.mark.parametrize("policy", ["decay", "lru"])
def test_each_further_pass_saves_the_cache(
    load: Load, tmp_path: Path, policy: CachePolicy, share: float
) -> None:
    """Of a scan, the least recently used saves nothing; and a replay of it does the same."""
    path, made = tmp_path / "route.csv", list[list[int]]()
    llm = with_budget(
        load, NAME, share, n_ubatch=UBATCH, cache_policy=policy, outputs=Outputs(route_trace=path)
    )
    reads_of(llm, made)
    held = llm.source.cache.budget // llm.layout.largest_expert()
    slices = len({tensor.projection for tensor in llm.layout.experts})
    for batch in prompt(1):
        llm.eval(batch)
    read = llm.counters.prefill.reads / slices
    llm.close()
    passes = [sum(of) for of in made[:PASSES]]
    layers = SPEC.layers - 1  # the last one sees one row of the prompt
    assert layers * SPEC.experts - layers <= passes[0] <= layers * SPEC.experts
    for later in passes[1:]:
        saved = passes[0] - later
        assert abs(saved - (held if policy == "decay" else 0)) <= SPEC.layers + SPEC.top_k
    assert sum(passes) <= read <= sum(passes) + layers  # what was read ahead and not used

    trace = read_trace(path)
    again = make_cache(Policy(policy), int(share * llm.layout.expert_bytes), trace)
    replayed = [len(again.lookup(b.layer, b.experts, b.rows).misses) for b in trace.batches]
    assert replayed == [count for of in made for count in of]


@pytest.mark.parametrize("parts", [1, 3])
def test_pools_take_turns_with_what_stands_beside_the_cache(
    load: Load, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """However many parts the cache has, and whichever experts stay in each."""
    monkeypatch.setattr(slots, "HUGE", 4096)  # what is given back is whole pages
    monkeypatch.setattr(cache, "PART_SLOTS", SPEC.layers * SPEC.experts // 2 // parts + 1)
    most, grew = [0], SlotTable._grew
    llm = with_budget(load, NAME, 0.5, n_ubatch=UBATCH, poison=True)
    source = llm.source
    table = source.table

    def watched(self: SlotTable, *given: object) -> None:
        grew(self, *given)  # type: ignore[arg-type]
        most[0] = max(most[0], self.held)

    monkeypatch.setattr(SlotTable, "_grew", watched)
    for seed in range(3):
        evaluate(llm, prompt(seed))
    assert len(table.pools) == parts
    stride = table.pools[0][0].stride
    room = source.cache.budget + llm.layout.layer_bytes() + source.window
    most_slots = room // llm.layout.largest_expert()
    assert source.cache.evictions > 0 < most[0] <= (most_slots + 1) * stride


def test_memory_has_room_for_what_stands_beside_a_chosen_size(
    large: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or less of it does: a cache of a chosen size is not made smaller for it."""
    monkeypatch.setattr(streamed_model, "available_bytes", machine.available)
    roomy = machine.new(large, cache_mb=20)
    layer = roomy.layout.layer_bytes()
    assert roomy.source.cache.spare == layer
    roomy.close()
    for room in (layer // 2, -MIB):
        machine.total = 20 * MIB + 2 * FIXED_HEADROOM + room
        llm = machine.new(large, cache_mb=20)
        own = llm.source.cache
        assert own.spare == max(0, room) and own.budget == 20 * MIB
        llm.eval([3, *range(100, 200)])
        assert own.used <= own.budget + own.spare
        llm.close()
