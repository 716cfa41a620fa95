"""`serve` on several machines: replicas of the model in Ray Serve, and what stands before them.

A conversation stays with one replica, whose context holds it: which one follows from the request's
beginning alone (`replica_of`), so that neither a table nor a memory of requests is needed, and the
same conversation finds its replica after a restart.

Hand-overs: a request goes to its replica whole, and the response comes back as its ASGI messages,
one by one. If the client goes, Ray cancels the call here, that cancels the one at the replica, and
the application there is told that its client has gone, as by a socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from routeahead.cluster import Cluster
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError
from routeahead.server.errors import ApiError, body_of
from routeahead.server.guard import read_body
from routeahead.server.listen import Serving, serving

NAME = "routeahead"
# What tells conversations apart: a prompt's first characters.
PREFIX = 512


@dataclass(frozen=True)
class Plan:
    """What every replica serves.

    Attributes:
        open_model: loads the model.
        settings: arguments of `listen.serving`; `host` is where requests come in.
        cpus: processors of a replica.
        port: where requests come in.
    """

    open_model: Callable[[], Llama]
    settings: dict[str, Any]
    cpus: int
    port: int


def replica_of(path: str, query: str, body: bytes, count: int) -> int:
    """The replica for a request: that of its conversation, or of `?replica=N` (0 if absent).

    A conversation is told by its system message, its tools and the first message of its user; a
    prompt without messages by its first characters. Both stay the same from turn to turn.
    """
    if not path.startswith("/v1/") or not body:
        wanted = dict(part.partition("=")[::2] for part in query.split("&")).get("replica", "0")
        return int(wanted) % count if wanted.isdecimal() else 0
    return int.from_bytes(hashlib.sha256(_prefix(body)).digest()[:8], "big") % count


def _prefix(body: bytes) -> bytes:
    try:
        asked = json.loads(body)
        messages = asked.get("messages")
        if isinstance(messages, list):
            ends = [i for i, one in enumerate(messages) if one.get("role") == "user"]
            first = messages[: ends[0] + 1] if ends else messages
            return json.dumps([asked.get("system"), asked.get("tools"), first]).encode()
        return json.dumps(asked.get("prompt", asked.get("input"))).encode()[:PREFIX]
    except (ValueError, AttributeError, RecursionError):
        return b""  # the replica says what is wrong with it


class Replica:
    """One model and its server, without a socket."""

    def __init__(self, plan: Plan) -> None:
        self._llm = plan.open_model()
        self._serving: Serving = serving(self._llm, **plan.settings)
        self._serving.evaluator.start()

    def __del__(self) -> None:
        """Ray Serve calls it when the replica is to end: what was said is written."""
        made = getattr(self, "_serving", None)
        if made:
            made.evaluator.close()
            self._llm.close()

    async def call(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """The response: its status and headers, then its body in pieces."""
        sent: asyncio.Queue[Any] = asyncio.Queue()
        gone, given = asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if given:
                await gone.wait()
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.put_nowait(message)

        task = asyncio.ensure_future(self._serving.app(scope, receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message.get("headers", ()))
                elif message.get("body"):
                    yield bytes(message["body"])
        finally:
            gone.set()
            await asyncio.wait({task}, timeout=5)


class Router:
    """Takes requests, and has the replica of each answer it."""

    def __init__(self, *replicas: Any) -> None:
        self._replicas = [replica.options(stream=True) for replica in replicas]

    async def __call__(self, request: Request) -> Response:
        try:
            body = await read_body(request.headers, request.receive)
        except ApiError as error:
            return JSONResponse(body_of(error.status, str(error), request.url.path), error.status)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.path.encode(),
            "query_string": request.url.query.encode(),
            "root_path": "",
            "headers": list(request.headers.raw),
            "client": None,
            "server": None,
        }
        index = replica_of(request.url.path, request.url.query, body, len(self._replicas))
        messages = self._replicas[index].call.remote(scope, body)
        try:
            status, headers = await anext(messages)
        except BaseException:
            messages.cancel()
            raise
        made = StreamingResponse(_rest(messages), status_code=status)
        made.raw_headers = [*headers, (b"x-routeahead-replica", str(index).encode())]
        return made


async def _rest(messages: Any) -> AsyncIterator[bytes]:
    ended = False
    try:
        async for piece in messages:
            yield piece
        ended = True
    finally:
        if not ended:
            messages.cancel()


def serve_replicas(address: str, count: int, plan: Plan, wait: Callable[[], None]) -> None:
    """Serves until `wait`, which is called when requests are taken, returns or is interrupted.

    Raises:
        SettingsError: there is no cluster, it has no room, or the model cannot be opened there.
    """
    with Cluster(address):
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        options = {"host": plan.settings["host"], "port": plan.port, "location": "HeadOnly"}
        serve.start(http_options=options)
        try:
            many = plan.settings["queue"] + 8
            replica = serve.deployment(
                Replica, ray_actor_options={"num_cpus": plan.cpus}, max_ongoing_requests=many
            )
            router = serve.deployment(
                Router, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=count * many
            )
            models = [replica.options(name=f"model-{i}").bind(plan) for i in range(count)]
            serve.run(router.bind(*models), name=NAME, route_prefix="/")
            wait()
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise SettingsError(f"--ray {address}: the replicas do not start: {reason}") from None
        finally:
            serve.shutdown()
