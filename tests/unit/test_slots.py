"""Slots and pools on their own, and how a cache divides its budget."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise

import pytest

from routeahead.experts import cache
from routeahead.experts.cache import ExpertCache
from routeahead.experts.layout import BLOCK, ExpertTensor, pieces
from routeahead.experts.slots import HUGE, Slots


def tensor(layer: int, projection: str, offset: int, expert_bytes: int) -> ExpertTensor:
    return ExpertTensor("t", layer, projection, "F32", 4, 0, offset, expert_bytes, expert_bytes)


def test_aligned_slices_land_in_place_and_others_are_moved() -> None:
    up, down = tensor(0, "up", 5 * BLOCK + 96, 2 * BLOCK), tensor(0, "down", 96, BLOCK + 32)
    slots = Slots([up, down])
    (pool,) = slots.share_out([[0]])
    first, second = slots.places[0]
    assert (first.phase, second.phase) == (96, 0)
    for expert in range(4):
        assert pool.target(first, expert, 3).shift == 0
        assert pool.target(second, expert, 3).shift == 96 + 32 * expert
    used: list[range] = []
    for slot in range(4):
        for place in (first, second):
            target = pool.target(place, 3, slot)
            assert target.offset % BLOCK == len(target.view) % BLOCK == 0
            start = ctypes.addressof(ctypes.c_char.from_buffer(target.view)) - pool.address
            assert start == slot * pool.stride + place.start
            used.append(range(start, start + len(target.view)))
            # After the move the slice is where the product looks for it.
            assert place.phase + place.nbytes <= len(target.view)
    assert all(a.stop <= b.start for a, b in pairwise(used))


@pytest.mark.parametrize("extra", [0, 32], ids=["whole blocks", "others"])
def test_slices_that_stand_side_by_side_are_one_read(extra: int) -> None:
    sizes = {"gate": 2 * BLOCK - 96 + extra, "down": 96, "up": BLOCK}
    stride, at, tensors = sum(sizes.values()), 7 * BLOCK + 64, list[ExpertTensor]()
    for name, nbytes in sizes.items():
        tensors.append(ExpertTensor("t", 0, name, "F32", 4, 0, at, nbytes, stride))
        at += nbytes
    plain = tensor(1, "gate", 0, 64)
    slots = Slots([*tensors, plain])
    pool, _ = slots.share_out([[0], [1]])
    (place,), (other,) = slots.places[0], slots.places[1]
    assert place.projections == "gate+down+up" and other.projections == "gate"
    assert (place.offset, place.stride, place.nbytes) == (7 * BLOCK + 64, stride, stride)
    assert pool.stride == -(-stride // BLOCK) * BLOCK + BLOCK
    for expert in range(4):
        target, start = pool.target(place, expert, 2), place.offset + expert * stride
        assert target.offset == start // BLOCK * BLOCK
        assert target.offset + target.need == start + stride
        assert target.shift == (start % BLOCK if extra else 0)
        assert start - target.offset - target.shift == place.phase


def test_slices_that_do_not_follow_each_other_are_read_apart() -> None:
    """Another layer's, another file's, another number of them, or a gap in between."""
    first = ExpertTensor("t", 0, "gate", "F32", 4, 0, 0, 64, 128)
    assert len(pieces([first, replace(first, offset=64)])) == 1
    for change in ({"layer": 1}, {"shard": 1}, {"n_expert": 8}, {"offset": 96}, {"stride": 256}):
        assert len(pieces([first, replace(first, **{"offset": 64} | change)])) == 2
    assert len(pieces([tensor(0, "gate", 0, 64), tensor(0, "up", 64, 64)])) == 2


def test_layers_of_one_size_have_slots_of_one_size() -> None:
    """Also where blocks cut their projections differently."""
    sizes = {0: (96, 8192 - 96), 1: (4096, 4096)}
    tensors = [
        tensor(n, p, 0, b) for n, two in sizes.items() for p, b in zip("ud", two, strict=True)
    ]
    slots = Slots(tensors)
    one, two = slots.share_out([[0], [1]])
    assert one.stride == two.stride and two.address % HUGE == 0
    assert one.address + 4 * one.stride <= two.address
    (both,) = slots.share_out([[0, 1]])
    assert both.stride == one.stride and slots.range.nbytes >= 8 * both.stride


def test_the_lowest_free_slot_is_taken_and_the_end_given_back() -> None:
    slots = Slots([tensor(0, "up", 0, HUGE - BLOCK)])
    (pool,) = slots.share_out([[0]])
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    for slot in (3, 0, 2):
        memory = pool.target(slots.places[0][0], slot, slot).view
        memory[:3] = memory[-BLOCK - 3 : -BLOCK] = b"abc"
        pool.give(slot)
    pool.shrink()
    assert pool.count == 2  # slot 1 is in use
    kept = pool.target(slots.places[0][0], 0, 0).view
    assert bytes(kept[:3]) == bytes(3)  # it was the whole of a page
    gone = pool.target(slots.places[0][0], 3, 3).view
    assert bytes(gone[:3]) == bytes(3)
    assert [pool.take() for _ in range(3)] == [0, 2, 3]


def test_between_slots_in_use_whole_pages_are_given_back() -> None:
    """A page that is part of a slot in use stays, and so does a slot that has it."""
    slots = Slots([ExpertTensor("t", 0, "up", "F32", 10, 0, 0, HUGE // 2, HUGE // 2)])
    (pool,) = slots.share_out([[0]])
    assert len([pool.take() for _ in range(10)]) * pool.stride == pool.held
    (place,) = slots.places[0]
    for slot in range(10):
        pool.target(place, 0, slot).view[:3] = b"abc"
    for slot in range(1, 9):
        pool.give(slot)
    pool.shrink()
    ends = [range(n * pool.stride, (n + 1) * pool.stride) for n in range(10)]
    gone = [n for n in range(10) if ends[n].start >= HUGE and ends[n].stop <= 4 * HUGE]
    assert 1 < len(gone) < 8 and pool.held == (10 - len(gone)) * pool.stride
    kept = [n for n in range(10) if bytes(pool.target(place, 0, n).view[:3]) == b"abc"]
    assert {0, 1, 9} <= set(kept) and not set(kept) & set(gone)
    taken = [pool.take() for _ in range(8)]
    assert taken == [*range(1, 9)] and pool.held == 10 * pool.stride


def test_a_budget_is_divided_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PART_SLOTS", 4)
    sizes = {0: 2, 1: 2, 3: 5, 4: 2}
    small, large = ExpertCache(11, sizes), ExpertCache(44, sizes)
    assert [*map(list, small.parts)] == [[0, 1, 4], [3]]
    assert [*map(list, large.parts)] == [[0], [1], [4], [3]]
    for experts in ([0, 1, 2, 3], [4, 5, 6, 7]):
        assert large.lookup(0, experts).misses == experts
    assert large.used == 8  # of 44: the rest is the other layers'
    large.lookup(3, [0, 1, 2, 3, 4])
    assert large.evictions == 4 and large.used == 8 + 25  # the batch stays until the next
    assert large.lookup(1, [0]).victims == [(3, 0)]


def test_another_budget_starts_empty() -> None:
    held = ExpertCache(4, {0: 1})
    held.lookup(0, [1, 2])
    held.budget = 6
    assert len(held) == held.used == 0 and held.misses == 2
