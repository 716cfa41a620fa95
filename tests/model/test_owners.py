"""Every thread touches only what is its own (`support.owners`), over random schedules.

The same check finds each of some mistakes that nothing else may notice for long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.library import PROMPTS, Library, evaluate
from support.schedules import POLICIES, run

from routeahead import Llama
from routeahead.engine.ownership import Ownership
from routeahead.experts.lanes import Lanes
from routeahead.experts.reader import Reader
from routeahead.experts.reads import Read
from routeahead.experts.source import ExpertSource

if TYPE_CHECKING:
    from support.owners import Owners

pytest_plugins = ["support.owners"]

Load = Callable[..., Llama]
NAME = "qwen3moe"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("borrow", [False, True])
def test_nobody_touches_what_is_not_its_own(tmp_path: Path, owners: Owners, borrow: bool) -> None:
    counts = run(tmp_path, loads=2 * len(POLICIES), each=3, seed=31, borrow=borrow)
    owners.check()
    assert counts["compared"] > 10 and owners.seen > 10_000
    if borrow:
        assert counts["borrowed"] > 10 and counts["refused"] > 10


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("borrow", [False, True])
def test_nobody_touches_what_is_not_its_own_for_long(
    tmp_path: Path, owners: Owners, borrow: bool
) -> None:
    counts = run(tmp_path, loads=28, each=12, seed=500 + borrow, borrow=borrow)
    print(f"borrow {borrow}: {counts}, {owners.seen} accesses")
    owners.check()
    assert counts["compared"] > 150


def test_filling_and_a_policy_that_drops(load: Load, library: Library, owners: Owners) -> None:
    for settings in ({"fill_cache": True}, {"drop_cold_experts": 0.3}, {"prefetch": 2}):
        llm = load(NAME, cache_mb=4, **settings)
        for _ in range(2):
            evaluate(llm, PROMPTS[0])
    owners.check()


def counts_in_the_book(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that writes to the cache's book."""
    run_read = Lanes._run

    def counting(self: Lanes, lane: int, read: Read) -> None:
        run_read(self, lane, read)
        llm.source.cache.misses += 1

    monkeypatch.setattr(Lanes, "_run", counting)


def looks_in_the_book(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that passes over what is evicted already."""
    run_read = Lanes._run

    def looking(self: Lanes, lane: int, read: Read) -> None:
        if (read.layer, read.expert) in llm.source.cache:
            run_read(self, lane, read)
        else:
            self._settle(read, None)

    monkeypatch.setattr(Lanes, "_run", looking)


def gives_a_slot(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that takes and gives a slot."""
    run_read = Lanes._run

    def giving(self: Lanes, lane: int, read: Read) -> None:
        with contextlib.suppress(IndexError):  # another thread took the last one meanwhile
            read.pool.give(read.pool.take())
        run_read(self, lane, read)

    monkeypatch.setattr(Lanes, "_run", giving)


def settles_without_the_ledger(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: Lanes, read: Read, error: BaseException | None) -> None:
        read.settled = True
        read.ticket.settle(error)

    monkeypatch.setattr(Lanes, "_settle", settle)


def changes_a_queued_read(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation thread, after `submit`."""
    submit = Lanes.submit

    def keen(self: Lanes, reads: list[Read], kind: Any = "demand") -> None:
        submit(self, reads, kind)
        for read in reads:
            read.adopted = False

    monkeypatch.setattr(Lanes, "submit", keen)


def counts_for_another(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lane 1 in lane 0's entries."""
    read_one = Lanes._read
    monkeypatch.setattr(Lanes, "_read", lambda self, _, read: read_one(self, 0, read))


class Shrinking:
    """Resizes the cache inside of a read, as a watcher would that did not ask whose it is."""

    llm: Any = None

    def __init__(self, inner: Reader) -> None:
        self._inner = inner

    def read(self, shard: int, offset: int, view: memoryview, need: int) -> int:
        if self.llm:
            self.llm.source.cache.resize(self.llm.source.cache.budget)
        return self._inner.read(shard, offset, view, need)

    def close(self) -> None:
        self._inner.close()


MISTAKES = [
    (counts_in_the_book, "ExpertCache.misses"),
    (looks_in_the_book, "ExpertCache._parts"),
    (gives_a_slot, "Pool._free"),
    (settles_without_the_ledger, "Ticket.remaining"),
    (changes_a_queued_read, "Read.adopted"),
    (counts_for_another, "entry 0 of a lane's counters"),
]


@pytest.mark.parametrize(("mistake", "touched"), MISTAKES, ids=[m[0].__name__ for m in MISTAKES])
def test_a_mistake_is_found(
    load: Load,
    owners: Owners,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[Llama, pytest.MonkeyPatch], None],
    touched: str,
) -> None:
    # Of two lanes without the ledger, one's count may be lost, and the batch would wait for ever.
    lanes = 1 if mistake is settles_without_the_ledger else 2
    llm = load(NAME, cache_mb=2, io_threads=lanes)
    evaluate(llm, PROMPTS[1])
    owners.check()
    with monkeypatch.context() as changed:
        mistake(llm, changed)
        evaluate(llm, PROMPTS[0])
        llm.source.lanes.drain()
    assert any(touched in breach for breach in owners.breaches)


def test_a_resize_without_asking_is_found(load: Load, owners: Owners) -> None:
    made: list[Shrinking] = []

    def wrap(inner: Reader) -> Shrinking:
        made.append(Shrinking(inner))
        return made[0]

    llm = load(NAME, cache_mb=2, wrap_reader=wrap)
    evaluate(llm, PROMPTS[1])
    owners.check()
    made[0].llm = llm
    llm.eval(PROMPTS[0][0])
    made[0].llm = None
    assert any("ExpertCache._budget" in breach for breach in owners.breaches)


def test_a_batch_that_does_not_take_the_cache_is_found(
    load: Load, owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another thread has borrowed it."""
    llm = load(NAME, cache_mb=2)
    evaluate(llm, PROMPTS[1])
    with monkeypatch.context() as changed:
        changed.setattr(Ownership, "take", lambda _: None)
        llm.streamed.ownership.borrow(lambda: run_in_thread(lambda: llm.eval([5])))
    assert any("MainThread" not in breach for breach in owners.breaches)


def run_in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_the_evaluation_thread_alone_submits(load: Load, owners: Owners) -> None:
    llm = load(NAME, cache_mb=2)
    source: ExpertSource = llm.source
    llm.streamed.ownership.take()
    run_in_thread(source.lanes.revoke)
    assert "the queues (revoke)" in owners.breaches[0]
