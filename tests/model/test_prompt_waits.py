"""The waits for what was read ahead for a prompt, one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.library import with_budget

from routeahead import Llama
from routeahead.experts.reader import Reader

Load = Callable[..., Llama]
NAME = "qwen3moe"
TOKENS = np.random.default_rng(1).integers(3, 259, size=3).tolist()


class Held:
    """Holds reads that match until they are let go."""

    def __init__(self, inner: Reader) -> None:
        self._inner, self.gate, self.inside = inner, threading.Event(), threading.Event()
        self.gate.set()

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        if not self.gate.is_set():
            self.inside.set()
            self.gate.wait()
        return self._inner.read(shard, offset, view, need)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def held(load: Load) -> tuple[Llama, Held]:
    """A model of which one lane is inside of a read that was made ahead for layer 2, expert 5."""
    made: list[Held] = []

    def wrap(inner: Reader) -> Reader:
        made.append(Held(inner))
        return made[0]

    llm = with_budget(load, NAME, 0.3, io_threads=1, wrap_reader=wrap)
    llm.eval([5])
    llm.source.recover()
    made[0].gate.clear()
    assert llm.source.read_ahead(2, [5])
    assert made[0].inside.wait(10)
    return llm, made[0]


def later(reader: Held) -> threading.Thread:
    """Lets the reads go in a moment."""
    timer = threading.Timer(0.05, reader.gate.set)
    timer.start()
    return timer


def bytes_of(llm: Llama, layer: int, expert: int) -> list[bytes]:
    """What is in an expert's slot, by read."""
    of = llm.source.table.layers[layer]
    found = []
    for place in of.places:
        view = of.pool.target(place, expert, int(of.slots[expert])).view
        start = place.phase
        found.append(bytes(view[start : start + place.nbytes]))
    return found


def in_file(llm: Llama, layer: int, expert: int) -> list[bytes]:
    found = []
    for place in llm.source.table.layers[layer].places:
        start = place.offset + expert * place.stride
        found.append(llm.layout.shards[0].path.read_bytes()[start : start + place.nbytes])
    return found


@pytest.mark.fast
def test_what_is_being_read_ahead_is_waited_for(held: tuple[Llama, Held]) -> None:
    llm, reader = held
    load_ = llm.source.require(2, [5])
    assert load_ and not load_.done()
    timer = later(reader)
    llm.source.wait(load_)
    assert reader.gate.is_set() and load_.done()
    assert bytes_of(llm, 2, 5) == in_file(llm, 2, 5)
    assert llm.source.ahead.useful == 1
    timer.join()


@pytest.mark.fast
def test_a_slot_is_free_once_no_lane_reads_into_it(held: tuple[Llama, Held]) -> None:
    """An expert that was read ahead and is not used: nobody else gets its slot before."""
    llm, reader = held
    slot = int(llm.source.table.layers[2].slots[5])
    load_ = llm.source.require(2, [1, 2, 3])
    assert slot not in llm.source.table.layers[2].slots[[1, 2, 3]].tolist()
    reader.gate.set()
    llm.source.wait(load_)
    for expert in (1, 2, 3):
        assert bytes_of(llm, 2, expert) == in_file(llm, 2, expert)
    llm.source.require(3, [7])
    assert int(llm.source.table.layers[3].slots[7]) == slot
    assert (llm.source.ahead.completed, llm.source.ahead.useful) == (1, 0)


@pytest.mark.fast
def test_a_prompt_ends_with_no_read_in_flight(held: tuple[Llama, Held]) -> None:
    llm, reader = held
    before = llm.source.lanes.reads
    timer = later(reader)
    llm.source.finish_ahead()
    assert reader.gate.is_set() and not llm.source._guesses
    assert llm.source.lanes.reads == before + 1  # the others were taken back
    assert llm.source.table.layers[2].slots[5] == -1
    timer.join()


@pytest.mark.fast
def test_a_certain_read_of_what_is_being_read_ahead(held: tuple[Llama, Held]) -> None:
    """An expert has one slot: two reads into it at once would be seen as soon as one is late."""
    llm, reader = held
    timer = later(reader)
    llm.source.read_early(2, [5, 6])
    assert reader.gate.is_set()
    load_ = llm.source.require(2, [5, 6])
    if load_:
        llm.source.wait(load_)
    for expert in (5, 6):
        assert bytes_of(llm, 2, expert) == in_file(llm, 2, expert)
    timer.join()


class Slow:
    """Takes its time for the slices of one expert of one layer."""

    def __init__(self, inner: Reader) -> None:
        self._inner, self.slices = inner, list[tuple[int, int]]()

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        if any(offset + need == end for _, end in self.slices):
            time.sleep(1)
        return self._inner.read(shard, offset, view, need)

    def close(self) -> None:
        self._inner.close()


def test_no_read_outlives_its_prompt(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not used, and slow: its bytes are the prompt's, and decoding begins with none."""
    made: list[Slow] = []

    def wrap(inner: Reader) -> Reader:
        made.append(Slow(inner))
        return made[0]

    llm = with_budget(load, NAME, 0, wrap_reader=wrap)
    window, layer, used = llm.streamed.stream._window, llm.layout.moe_layers[-2], set[int]()
    routed = window.routed

    def note(at: int, ids: np.ndarray) -> None:
        used.update(ids.ravel().tolist() if at == layer else ())
        routed(at, ids)
        while at < layer and llm.source.lanes._queues["ahead"]:
            time.sleep(0.001)  # a lane begins it

    window.routed = note  # type: ignore[method-assign]
    llm.eval(TOKENS)
    unused = min(set(range(16)) - used)
    made[0].slices = [t.slice_of(unused) for t in llm.layout.experts if t.layer == layer]
    monkeypatch.setattr(window._usage[layer], "likely", lambda rows: [unused])
    llm.reset()
    llm.eval(TOKENS)
    assert not llm.source._guesses
    assert llm.source.lanes.reads == llm.counters.prefill.reads
    assert llm.source.ahead.completed > llm.source.ahead.useful
