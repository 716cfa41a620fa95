"""Random schedules: prompts, single tokens and guesses to verify, under delays, faults and changes
of the cache; every row of logits is the one of a run in which nothing overlaps."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from routeahead import Llama, ReadError
from routeahead.engine.packing import write_packed
from routeahead.engine.streamed_model import Hooks
from routeahead.experts.reader import Reader
from support import models
from support.readers import Unruly, disk_error, interrupt
from support.reference import Logits, Resident

CONTEXT = 128
SPECS = {
    name: replace(models.FIXTURES[name], layers=4, experts=8, top_k=2)
    for name in ("qwen3moe", "gpt-oss")
}
POLICIES: list[dict[str, Any]] = [
    {},
    {"prefetch": 2},
    {"predict_prefetch": True},
    {"cache_policy": "decay"},
    {"route_ahead": 1},
    {"route_ahead": 2, "route_ahead_compute": "worker"},
    {"route_ahead": 1, "route_ahead_compute": "graph"},
]


@dataclass(frozen=True)
class Script:
    """A prompt and what follows it.

    Attributes:
        steps: tokens that are evaluated together, and how many of them are kept.
    """

    prompt: list[int]
    steps: list[tuple[list[int], int]]


def scripts(rng: random.Random) -> list[Script]:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 250) for _ in range(count)]

    made = []
    for length in (1, 7, 24, 40):
        rows = [rng.choice([1, 1, 2, 3, 5]) for _ in range(5)]
        steps = [(tokens(count), rng.randint(1, count)) for count in rows]
        made.append(Script(tokens(length), steps))
    return made


def evaluate(llm: Llama, script: Script, steps: int | None = None) -> list[Logits]:
    """The logits of every row but the prompt's, of which it is the last."""
    llm.reset()
    llm.phase = "prefill"
    llm.eval(script.prompt)
    found = [_logits(llm, 1)]
    llm.phase = "decode"
    for tokens, kept in script.steps[:steps]:
        at, llm._verifying = llm.n_tokens, True
        try:
            llm.eval(tokens)
        finally:
            llm._verifying = False
        found.append(_logits(llm, len(tokens)))
        llm.n_tokens = at + kept
    return found


def _logits(llm: Llama, rows: int) -> Logits:
    shape = (rows, llm.n_vocab())
    return np.stack(
        [
            np.ctypeslib.as_array(llm._ctx.get_logits_ith(row - rows), shape=shape[1:]).copy()
            for row in range(rows)
        ]
    )


class Expected:
    """What each script gives: alone in memory by llama.cpp, or, where a policy chooses experts,
    with one lane, no overlap and no cache."""

    def __init__(self, paths: dict[str, Path], made: list[Script]) -> None:
        self._paths, self._scripts = paths, made
        self._known: dict[tuple[str, str], list[list[Logits]]] = {}

    def logits(self, name: str, policy: dict[str, Any]) -> list[list[Logits]]:
        key = name, repr(policy) if "route_ahead" in policy else ""
        if key not in self._known:
            serial = self._committed if key[1] else self._resident
            self._known[key] = serial(name, policy)
        return self._known[key]

    def _resident(self, name: str, _: dict[str, Any]) -> list[list[Logits]]:
        model, found = Resident(self._paths[name], n_ctx=CONTEXT, threads=1), []
        for script in self._scripts:
            found.append([model.evaluate([script.prompt])])
            at = len(script.prompt)
            for tokens, kept in script.steps:
                found[-1].append(model.rows(tokens, at))
                at += kept
        model.close()
        return found

    def _committed(self, name: str, policy: dict[str, Any]) -> list[list[Logits]]:
        plain = {**policy, "route_ahead_compute": "inline", "io_threads": 1, "overlap": False}
        llm = Llama(self._paths[name], n_ctx=CONTEXT, n_threads=1, cache_mb=0, **plain)
        found = [evaluate(llm, script) for script in self._scripts]
        llm.close()
        return found


class Borrower(threading.Thread):
    """Resizes the cache at random moments between two batches, as the watcher does."""

    def __init__(self, llm: Llama, sizes: list[int], seed: int) -> None:
        super().__init__(name="watcher of the test", daemon=True)
        self._llm, self._sizes, self._random = llm, sizes, random.Random(seed)
        self._ended, self.done, self.refused = threading.Event(), 0, 0

    def run(self) -> None:
        while not self._ended.wait(self._random.uniform(0, 0.002)):
            if self._llm.streamed.ownership.borrow(self._resize):
                self.done += 1
            else:
                self.refused += 1

    def _resize(self) -> None:
        self._llm.source.resize(self._random.choice(self._sizes))

    def __enter__(self) -> Borrower:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def run(
    folder: Path, loads: int, each: int, seed: int, *, borrow: bool = False, packed: bool = False
) -> dict[str, int]:
    """`each` schedules on each of `loads` loads; how many of each kind there were.

    With `borrow`, another thread resizes the cache between batches, and no signal strikes. With
    `packed`, an expert is one read.
    """
    rng = random.Random(seed)
    made = scripts(rng)
    paths = {}
    for name, spec in SPECS.items():
        (folder / name).mkdir()
        paths[name] = models.write(folder / name / "model.gguf", spec)
    streamed = dict(paths)
    if packed:
        streamed = {name: path.with_name("packed.gguf") for name, path in paths.items()}
        for name, path in paths.items():
            write_packed(path, streamed[name])
    expected, counts = Expected(paths, made), dict.fromkeys(("compared", "cut", "struck"), 0)
    counts |= dict.fromkeys(("borrowed", "refused"), 0)
    for number in range(loads):
        name, policy = list(SPECS)[number % 2], POLICIES[number // 2 % len(POLICIES)]
        wanted, poison = expected.logits(name, policy), rng.random() < 0.7
        readers: list[Unruly] = []

        def unruly(inner: Reader, readers: list[Unruly] = readers) -> Reader:
            readers.append(Unruly(inner))
            return readers[0]

        llm = Llama(
            streamed[name],
            n_ctx=CONTEXT,
            n_batch=CONTEXT,
            n_threads=1,
            cache_mb=0,
            io_threads=rng.choice([1, 2, 4]),
            overlap=rng.random() < 0.7,
            _hooks=Hooks(wrap_reader=unruly, poison=poison),
            **policy,
        )
        source = llm.source
        assert source
        faults = [disk_error] if poison or borrow else [disk_error, interrupt]
        least, all_of_it = llm.layout.token_bytes(), llm.layout.expert_bytes
        sizes = [0, least // 2, least, 2 * least, all_of_it // 2, all_of_it]
        with Borrower(llm, sizes, seed) if borrow else contextlib.nullcontext() as borrower:
            for schedule in range(each):
                readers[0].schedule(seed + schedule, longest=(0, 0.0002, 0.0006))
                if rng.random() < 0.3 and not borrow:
                    source.cache.budget = rng.choice(sizes)
                which, kind = rng.randrange(len(made)), rng.random()
                if kind < 0.15:
                    evaluate(llm, made[which], rng.randrange(len(made[which].steps)))
                    counts["cut"] += 1
                elif kind < 0.4:
                    readers[0].strike(rng.randrange(1, 120), rng.choice(faults))
                    counts["struck"] += _struck(llm, made[which])
                    readers[0].strike(0, disk_error)
                else:
                    for got, want in zip(evaluate(llm, made[which]), wanted[which], strict=True):
                        np.testing.assert_array_equal(got, want)
                    counts["compared"] += 1
        if borrower:
            counts["borrowed"] += borrower.done
            counts["refused"] += borrower.refused
        for got, want in zip(evaluate(llm, made[0]), wanted[0], strict=True):
            np.testing.assert_array_equal(got, want)
        llm.close()
    return counts


def _struck(llm: Llama, script: Script) -> bool:
    assert llm.source
    try:
        try:
            evaluate(llm, script)
        except ReadError:
            return True
        finally:
            llm.streamed.ownership.take()
            llm.source.lanes.drain()  # the signal of a read that nobody waits for comes here
    except KeyboardInterrupt:
        return True
    return False
