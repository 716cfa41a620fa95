"""What a request passes before a route sees it: host, key, size; and headers of every response.

The body is read here, whole and within a limit, so that no route waits for a slow client.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routeahead.server.errors import ApiError, body_of

BODY_LIMIT = 8 << 20  # bytes; a context of a million tokens has about half as many
BODY_S = 30.0  # for a body to arrive
OPEN = frozenset({"/", "/health"})  # without a key: the page asks for it, a supervisor has none
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_HEADERS = {
    # The page is one file with its script and style inside, and talks to this server alone.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], loopback: bool) -> None:
        """
        Args:
            keys: any of them opens the server; none are needed if there are none.
            loopback: the server listens there, so a request for another host was lured here by a
                page whose name was bound to this address.
        """
        self._app, self._loopback = app, loopback
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check(scope, headers)
            body = await read_body(headers, receive)
        except ApiError as error:
            content = body_of(error.status, str(error), scope["path"])
            response = JSONResponse(content, error.status, headers=error.headers)
            await response(scope, receive, send_with_headers)
            return
        except ClientDisconnect:
            return
        await self._app(scope, _replay(body, receive), send_with_headers)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self._loopback and name.strip("[]").lower() not in LOOPBACK:
            raise ApiError(403, f"this server listens on this machine only, not as {name!r}")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            if kind != "application/json":  # what a form of another site cannot send
                raise ApiError(415, "content-type: send application/json")
        if self._keys and scope["path"] not in OPEN and not self._known(headers):
            raise ApiError(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY or x-api-key",
                {"WWW-Authenticate": "Bearer"},
            )

    def _known(self, headers: Headers) -> bool:
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        data = given.strip().encode("latin-1")
        # Every key is compared, so that the time taken tells neither which nor how much was right.
        return any([hmac.compare_digest(data, key) for key in self._keys])


async def read_body(headers: Headers, receive: Receive) -> bytes:
    """All of a request's body.

    Raises:
        ApiError: it is too large or too slow.
        ClientDisconnect: the client has gone.
    """
    length = headers.get("content-length", "0")
    too_large = ApiError(413, f"the request is larger than {BODY_LIMIT >> 20} MiB: send less")
    if length.isdigit() and int(length) > BODY_LIMIT:
        raise too_large
    parts, size, more = [], 0, True
    loop = asyncio.get_running_loop()
    until = loop.time() + BODY_S
    while more:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - loop.time()))
        except asyncio.TimeoutError:
            raise ApiError(408, f"the request did not arrive within {BODY_S:.0f} s") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY_LIMIT:
            raise too_large
        more = message.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body, then what the connection has to say (that it was closed)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
