"""Long use: memory stays flat, every routed slot is counted once, every byte is the kernel's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.library import CONTEXT
from support.readers import Unruly, interrupt

from routeahead import Llama, ReadError

Load = Callable[..., Llama]
PROCESS = psutil.Process()


def feed(llm: Llama, tokens: int) -> Iterator[tuple[int, int]]:
    """Evaluates random tokens, one a batch; yields how many were evaluated and how many cancelled
    so far."""
    rng = random.Random(0)
    llm.phase = "decode"
    done = cancelled = 0
    while done < tokens:
        if llm.n_tokens >= CONTEXT - 1:
            llm.reset()
        try:
            llm.eval([rng.randrange(3, 259)])
            done += 1
        except (KeyboardInterrupt, ReadError):
            cancelled += 1
        yield done, cancelled


def soak(load: Load, tokens: int, cancel_every: int, note: Callable[[str], None]) -> None:
    made: list[Unruly] = []

    def wrap(inner: object) -> Unruly:
        made.append(Unruly(inner))  # type: ignore[arg-type]
        return made[0]

    llm = load("qwen3moe", cache_mb=1, force_cache=True, route_ahead=2, wrap_reader=wrap)
    lanes, decode = llm.source.lanes, llm.counters.decode
    if not llm.direct_io:
        pytest.skip("this file system has no O_DIRECT: its reads come from the page cache")
    cancelled, peak, next_cancel = 0, 0, cancel_every
    warm = read = counted = 0
    warmup = tokens // 10
    for done, cancelled in feed(llm, tokens):
        if done >= next_cancel and done < tokens:
            made[0].strike(1 + cancelled % 7, interrupt)
            next_cancel += cancel_every
        if done == warmup and not warm:
            warm = PROCESS.memory_info().rss
            read, counted = PROCESS.io_counters().read_bytes, lanes.bytes_read
        if done > warmup and done % 100 == 0:
            peak = max(peak, PROCESS.memory_info().rss)
    lanes.drain()  # what a guess still reads counts on both sides
    read, counted = PROCESS.io_counters().read_bytes - read, lanes.bytes_read - counted
    slots = decode.tokens * len(llm.layout.moe_layers) * llm.layout.n_expert_used
    note(
        f"{decode.tokens} tokens, {cancelled} cancelled; RSS {warm >> 20} MiB after {warmup}, "
        f"{peak >> 20} MiB at most later; {decode.hits} hits + {decode.misses} misses of {slots} "
        f"slots; {counted} bytes counted, {read} by the kernel"
    )
    assert decode.tokens == tokens and cancelled == (tokens - 1) // cancel_every
    assert decode.hits + decode.misses == slots
    assert peak <= 1.05 * warm
    # The kernel's figure has what else is read: pages of libraries that it had dropped.
    assert counted <= read <= 1.005 * counted


def test_a_short_soak(load: Load) -> None:
    soak(load, 1500, 100, print)


@pytest.mark.slow
def test_a_long_soak(load: Load, tmp_path: Path) -> None:
    soak(load, 20_000, 500, print)
