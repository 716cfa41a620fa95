"""The server's routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routeahead.engine.llama import Llama
from routeahead.server import anthropic_api, openai_api
from routeahead.server.embeddings import EmbeddingsRequest, embed
from routeahead.server.errors import ApiError, body_of
from routeahead.server.evaluator import Evaluator, Job
from routeahead.server.guard import Guard
from routeahead.server.live import Live, as_dict
from routeahead.server.metrics import Metrics
from routeahead.server.turn import Event, Turn, Turns

_PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Served:
    """What the routes use.

    Attributes:
        name: what the model is called.
        embeds: the model was loaded for embeddings, and answers nothing else.
    """

    name: str
    evaluator: Evaluator
    live: Live
    turns: Turns
    about: dict[str, Any]
    embeds: bool = False


def make_app(served: Served, *, keys: Sequence[str], loopback: bool) -> ASGIApp:
    """The application, with what guards it."""
    app = FastAPI(title="routeahead", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(lambda: served.live.latest, lambda: served.evaluator.load)
    _add_errors(app)
    _add_pages(app, served, metrics)
    _add_openai(app, served)
    _add_anthropic(app, served)
    paths = frozenset(getattr(route, "path", "") for route in app.routes)
    return _Counted(Guard(app, keys=keys, loopback=loopback), metrics, paths)


def _add_pages(app: FastAPI, served: Served, metrics: Metrics) -> None:
    page = _PAGE.read_text(encoding="utf-8")

    @app.get("/")
    async def index() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        running, waiting = served.evaluator.load
        return {"status": "ok", "running": running, "waiting": waiting}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        served.evaluator.wake()
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/api/stream")
    async def stream() -> dict[str, Any]:
        running, waiting = served.evaluator.load
        found = as_dict(served.live.watch())
        served.evaluator.wake()
        return {**found, "model": served.about, "running": running, "waiting": waiting}


def _add_openai(app: FastAPI, served: Served) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": served.name, "object": "model", "created": 0, "owned_by": "routeahead"}
        return {"object": "list", "data": [card]}

    @app.post("/v1/chat/completions")
    async def chat(body: openai_api.ChatRequest, request: Request) -> Response:
        writer = openai_api.Writer(served.name, chat=True, usage=body.usage)
        return await _answer(served, request, _turn(body), writer, bool(body.stream))

    @app.post("/v1/completions")
    async def complete(body: openai_api.TextRequest, request: Request) -> Response:
        turn = _turn(body)
        echo = turn.prompt if body.echo and isinstance(turn.prompt, str) else ""
        writer = openai_api.Writer(served.name, chat=False, usage=body.usage, echo=echo)
        return await _answer(served, request, turn, writer, bool(body.stream))

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        if not served.embeds:
            raise ApiError(400, "the model was loaded to answer: start serve with --embeddings")
        job = served.evaluator.submit(lambda llm: embed(llm, body, served.name))
        return JSONResponse((await _collect(served.evaluator, job, request))[0])


def _add_anthropic(app: FastAPI, served: Served) -> None:
    @app.post("/v1/messages")
    async def messages(body: anthropic_api.MessagesRequest, request: Request) -> Response:
        writer = anthropic_api.Writer(served.name)
        return await _answer(served, request, _turn(body), writer, body.stream)

    @app.post("/v1/messages/count_tokens")
    async def count(body: anthropic_api.CountRequest, request: Request) -> Response:
        turn = _turn(body)
        job = served.evaluator.submit(lambda llm: served.turns.count(llm, turn))
        (started,) = await _collect(served.evaluator, job, request)
        return JSONResponse({"input_tokens": started.prompt_tokens})


# --- a turn, from the request to the response ---


def _turn(body: openai_api.Common | anthropic_api.CountRequest) -> Turn:
    try:
        return body.turn()
    except (RecursionError, ValueError):  # pydantic's guard against endless recursion
        raise ApiError(400, "the request is nested too deeply") from None


async def _answer(
    served: Served,
    request: Request,
    turn: Turn,
    writer: openai_api.Writer | anthropic_api.Writer,
    stream: bool,
) -> Response:
    if served.embeds:
        raise ApiError(400, "the model was loaded for embeddings: start serve without --embeddings")

    def work(llm: Llama) -> Iterator[Event | None]:
        return served.turns.answer(llm, turn)

    job = served.evaluator.submit(work)
    if not stream:
        return JSONResponse(writer.whole(await _collect(served.evaluator, job, request)))
    events = job.events()
    # A request that is refused gets its own status: the response begins with the first event.
    first = await _unless_gone(served.evaluator, job, request, anext(events))
    written = writer.stream(_rest(served.evaluator, job, first, events))
    return StreamingResponse(written, media_type="text/event-stream")


async def _rest(
    evaluator: Evaluator, job: Job, first: Event, events: AsyncIterator[Event]
) -> AsyncIterator[Event]:
    """All events. Starlette cancels their reader if the client goes, and that ends the job."""
    try:
        yield first
        async for event in events:
            yield event
    finally:
        evaluator.cancel(job)


async def _collect(evaluator: Evaluator, job: Job, request: Request) -> list[Any]:
    async def everything() -> list[Any]:
        return [event async for event in job.events()]

    found: list[Any] = await _unless_gone(evaluator, job, request, everything())
    return found


async def _unless_gone(evaluator: Evaluator, job: Job, request: Request, wanted: Any) -> Any:
    """Waits for `wanted`; ends the job if the client goes before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting, watching = asyncio.ensure_future(wanted), asyncio.create_task(gone())
    try:
        await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise ApiError(499, "the client has closed the connection")
    finally:
        if not (waiting.done() and not waiting.cancelled() and waiting.exception() is None):
            evaluator.cancel(job)
        for task in (waiting, watching):
            task.cancel()
        await asyncio.gather(waiting, watching, return_exceptions=True)


# --- errors ---


def _add_errors(app: FastAPI) -> None:
    def respond(request: Request, status: int, message: str, headers: Any = None) -> JSONResponse:
        return JSONResponse(body_of(status, message, request.url.path), status, headers=headers)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return respond(request, error.status, str(error), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return respond(request, 400, _first(error))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> JSONResponse:
        message = {
            404: f"{request.url.path}: there is no such path",
            405: f"{request.url.path}: does not take {request.method}",
        }.get(error.status_code, str(error.detail))
        return respond(request, error.status_code, message, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return respond(request, 500, f"the server failed: {type(error).__name__}")


def _first(error: RequestValidationError) -> str:
    """Where the first fault is and what it is, in one line."""
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        return f"the body is no JSON: {fault.get('ctx', {}).get('error', fault['msg'])}"
    where = ".".join(str(part) for part in fault["loc"][1:]) or "the body"
    return f"{where}: {fault['msg']}"


class _Counted:
    """ASGI middleware: counts responses by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 499

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.count(path, status, time.perf_counter() - started)
