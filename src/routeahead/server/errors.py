"""Errors that a client is told of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routeahead.errors import RouteAheadError

_OPENAI = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(RouteAheadError):
    """A request that cannot be served: an HTTP status and one line for the client."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def body_of(status: int, message: str, path: str) -> dict[str, Any]:
    """An error in the form of the API that `path` belongs to."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _OPENAI.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
