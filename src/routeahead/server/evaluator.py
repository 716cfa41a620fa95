"""The evaluation thread: it alone uses the model, for one job at a time.

Hand-overs between threads, all under one lock or through the event loop:

* *A job*, from the event loop to this thread: appended to the queue under `_changed`.
* *Its events*, back: `call_soon_threadsafe` appends them to the job's own asyncio queue.
* *That nobody wants it any more*: `Job.cancelled` is set by the loop and read between two events,
  and at each layer of a long batch.
* *What the page and the metrics show*: `Live` replaces whole objects that nobody changes.

The model is made by the thread that makes the evaluator, used by this thread from `start` to the
end of `close`, and then again by the one that closed it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from routeahead.engine.llama import Llama
from routeahead.errors import RouteAheadError, Stopped
from routeahead.server.errors import ApiError
from routeahead.server.live import Live
from routeahead.server.prompt_cache import PromptCache

Work = Callable[[Llama], Iterator[Any]]

IDLE_S = 1.0  # without a job for so long, the conversation is written to disk
STOPPING = "the server is being stopped: try again later"
CUT = "the answer was cut: the server is being stopped"
_END = object()
_log = logging.getLogger(__name__)


class Job:
    """A piece of work for the evaluation thread, and its events for the loop that asked.

    Attributes:
        cancelled: its events are not wanted any more.
    """

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.cancelled = threading.Event()
        self._loop = loop
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, event: Any) -> None:
        """From the evaluation thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has been closed: nobody reads this
            self.cancelled.set()

    async def events(self) -> AsyncIterator[Any]:
        """What the work gave.

        Raises:
            ApiError: the work failed; the message is for the client.
        """
        while (event := await self._events.get()) is not _END:
            if isinstance(event, Exception):
                raise event
            yield event


class Evaluator:
    """Runs jobs in the order in which they came."""

    def __init__(self, llm: Llama, live: Live, prompts: PromptCache | None, queue: int) -> None:
        """
        Args:
            prompts: where conversations outlive the process; None if they do not.
            queue: jobs that may wait.
        """
        self._llm, self._live, self._prompts, self._limit = llm, live, prompts, queue
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._mean_s = 1.0  # of the jobs so far, the later ones counting more
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """Jobs that run and jobs that wait."""
        with self._changed:
            return int(self._running is not None), len(self._waiting)

    def submit(self, work: Work) -> Job:
        """Queues work; its iterator runs in the evaluation thread.

        Raises:
            ApiError: the queue is full, or the server is being stopped.
        """
        job = Job(work, asyncio.get_running_loop())
        with self._changed:
            if self._closing:
                raise ApiError(503, STOPPING)
            waiting = len(self._waiting) + (self._running is not None)
            if waiting > self._limit:
                after = math.ceil(waiting * self._mean_s)
                raise ApiError(
                    429,
                    f"{len(self._waiting)} requests are waiting already: try again in {after} s",
                    headers={"Retry-After": str(after)},
                )
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """Ends a job at its next token or batch, or at the next layer of a long batch, or takes it
        from the queue. Harmless if it has ended."""
        job.cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def wake(self) -> None:
        """Has an idle evaluation thread look whether the page wants something."""
        with self._changed:
            self._changed.notify_all()

    def close(self, grace_s: float = 0.0) -> None:
        """Drops what waits, cuts what runs, writes the conversation, ends the thread.

        Args:
            grace_s: how long what runs may go on.
        """
        with self._changed:
            self._closing = True
            dropped, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for job in dropped:
            job.put(ApiError(503, STOPPING))
        with self._changed:
            self._changed.wait_for(lambda: self._running is None, grace_s)
            if self._running:
                self._running.cancelled.set()
        if self._thread.ident:
            self._thread.join()

    # --- in the evaluation thread ---

    def _run(self) -> None:
        unsaved = False
        while True:
            with self._changed:
                self._running = None
                self._changed.notify_all()  # to `close`
                if not self._waiting and not self._closing:
                    self._changed.wait(IDLE_S if unsaved else None)
                if self._waiting:
                    self._running = self._waiting.popleft()
                closing = self._closing
            if self._running:
                self._do(self._running)
                unsaved = True
                continue
            self._live.offer(self._llm)
            if unsaved:  # idle, or about to end
                self._save()
                unsaved = False
            if closing:
                return

    def _do(self, job: Job) -> None:
        started = time.perf_counter()
        events: Iterator[Any] = iter(())
        try:
            with self._llm.stopping(job.cancelled.is_set):
                events = job.work(self._llm)
                for event in events:
                    if job.cancelled.is_set():
                        raise ApiError(503, CUT)
                    if event is not None:
                        job.put(event)
                    self._live.offer(self._llm)
        except Stopped:
            job.put(ApiError(503, CUT))
        except ApiError as error:
            job.put(error)
        except RouteAheadError as error:
            status = 400 if isinstance(error, ValueError) else 500
            job.put(ApiError(status, str(error)))
        except Exception as error:  # the thread serves everybody: it must not end
            _log.exception("a request failed")
            job.put(ApiError(500, f"the request failed inside the server: {type(error).__name__}"))
        finally:
            close = getattr(events, "close", None)
            if close:
                close()
            self._live.offer(self._llm, force=True)  # before anyone can know that this has ended
            job.put(_END)
        self._mean_s += 0.2 * (time.perf_counter() - started - self._mean_s)

    def _save(self) -> None:
        if not self._prompts:
            return
        try:
            self._prompts.save(self._llm)
        except OSError as error:
            _log.warning("the conversation was not written to disk: %s", error)
