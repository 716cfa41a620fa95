"""The evaluation thread and its hand-overs, with work that takes its time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.library import Library

from routeahead import Llama
from routeahead.errors import SettingsError
from routeahead.server.errors import ApiError
from routeahead.server.evaluator import Evaluator, Job
from routeahead.server.live import Live


@pytest.fixture
def evaluator(load: Any) -> Iterator[Evaluator]:
    llm = load("qwen3moe")
    made = Evaluator(llm, Live(llm), None, queue=2)
    made.start()
    yield made
    made.close()


async def everything(job: Job) -> list[Any]:
    return [event async for event in job.events()]


async def _until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


class Gate:
    """Work that gives two events, and between them waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go, self.closed = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, llm: Llama) -> Iterator[str]:
        self.begun.set()
        try:
            yield "first"
            self.go.wait(60)
            yield "second"
        finally:
            self.closed.set()


def test_before_the_first_job_what_idle_lanes_read_is_shown(load: Any) -> None:
    llm = load("qwen3moe", fill_cache=True)
    live = Live(llm)
    assert live.latest.cache["budget"] > 0  # the cache is empty, and it is there
    evaluator = Evaluator(llm, live, None, queue=2)
    evaluator.start()

    def filled() -> bool:
        live.watch()
        evaluator.wake()
        return live.latest.idle_bytes >= llm.layout.expert_bytes

    try:
        asyncio.run(_until(filled))
    finally:
        evaluator.close()
    assert set(live.latest.residency) == set(llm.layout.moe_layers)


def test_jobs_run_one_at_a_time_in_their_order(evaluator: Evaluator) -> None:
    running: list[int] = []

    def work(number: int) -> Any:
        def run(llm: Llama) -> Iterator[tuple[int, int]]:
            running.append(number)
            for step in range(3):
                time.sleep(0.01)  # others have every chance to get between
                yield number, step
            assert running[-1] == number

        return run

    async def main() -> list[list[Any]]:
        jobs = []
        for number in range(3):
            jobs.append(evaluator.submit(work(number)))
        return await asyncio.gather(*map(everything, jobs))

    found = asyncio.run(main())
    assert found == [[(number, step) for step in range(3)] for number in range(3)]
    assert running == [0, 1, 2]


def test_a_full_queue_refuses_and_a_cancelled_job_makes_room(evaluator: Evaluator) -> None:
    first, second = Gate(), Gate()

    async def main() -> None:
        running = evaluator.submit(first)
        await _until(first.begun.is_set)
        waiting = [evaluator.submit(second), evaluator.submit(second)]
        with pytest.raises(ApiError, match="2 requests are waiting") as full:
            evaluator.submit(second)
        assert full.value.status == 429 and int(full.value.headers["Retry-After"]) >= 1
        evaluator.cancel(waiting[0])
        evaluator.submit(lambda llm: iter(["third"]))
        evaluator.cancel(running)
        first.go.set()
        with pytest.raises(ApiError, match="was cut"):
            await everything(running)
        assert first.closed.is_set()
        second.go.set()
        assert await everything(waiting[1]) == ["first", "second"]
        evaluator.cancel(waiting[1])  # it has ended: harmless

    asyncio.run(main())


def test_a_cancelled_job_ends_inside_a_long_batch(library: Library) -> None:
    """At the next layer, and the next job finds the model as it was."""
    llm = Llama(library.path("qwen3moe"), n_ctx=2048, cache_mb=1, force_cache=True, n_threads=1)
    evaluator = Evaluator(llm, Live(llm), None, queue=2)
    begun, go, seen = threading.Event(), threading.Event(), list[int]()
    routed = llm.streamed.stream._window.routed

    def rests(layer: int, ids: Any) -> None:
        seen.append(layer)
        begun.set()
        go.wait(60)
        routed(layer, ids)

    llm.streamed.stream._window.routed = rests  # type: ignore[method-assign]

    def evaluates(llm: Llama) -> Iterator[int]:
        llm.eval([5, 6, 7] * 300)
        yield llm.n_tokens

    async def main() -> None:
        running = evaluator.submit(evaluates)
        await _until(begun.is_set)
        evaluator.cancel(running)
        go.set()
        with pytest.raises(ApiError, match="was cut"):
            await everything(running)
        assert seen == llm.layout.moe_layers[:1] and llm.n_tokens == 0
        assert await everything(evaluator.submit(evaluates)) == [900]

    evaluator.start()
    asyncio.run(main())
    evaluator.close()
    llm.close()


def test_a_failure_is_the_job_s_alone(evaluator: Evaluator) -> None:
    def fails(error: Exception) -> Any:
        def run(llm: Llama) -> Iterator[str]:
            yield "begun"
            raise error

        return run

    async def main() -> None:
        for error, status, words in (
            (SettingsError("what is wrong"), 400, "what is wrong"),
            (RuntimeError("a secret"), 500, "failed inside the server: RuntimeError"),
            (ApiError(418, "teapot"), 418, "teapot"),
        ):
            with pytest.raises(ApiError, match=words) as told:
                await everything(evaluator.submit(fails(error)))
            assert told.value.status == status and "secret" not in str(told.value)
        assert await everything(evaluator.submit(lambda llm: iter(["fine"]))) == ["fine"]

    asyncio.run(main())


def test_closing_waits_for_what_runs_and_drops_what_waits(evaluator: Evaluator) -> None:
    gate = Gate()

    async def main() -> None:
        running, waiting = evaluator.submit(gate), evaluator.submit(gate)
        await _until(gate.begun.is_set)
        closing = asyncio.create_task(asyncio.to_thread(evaluator.close, 30.0))
        with pytest.raises(ApiError, match="being stopped"):
            await everything(waiting)
        with pytest.raises(ApiError, match="being stopped"):
            evaluator.submit(gate)
        assert not closing.done()
        gate.go.set()
        assert await everything(running) == ["first", "second"]
        await closing

    asyncio.run(main())


def test_a_loop_that_has_ended_takes_nothing_with_it(evaluator: Evaluator) -> None:
    gate = Gate()

    async def leaves() -> Job:
        job = evaluator.submit(gate)
        await _until(gate.begun.is_set)
        return job

    job = asyncio.run(leaves())
    gate.go.set()
    assert gate.closed.wait(10) and job.cancelled.wait(10)

    async def main() -> None:
        assert await everything(evaluator.submit(lambda llm: iter(["fine"]))) == ["fine"]

    asyncio.run(main())
