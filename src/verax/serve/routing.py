"""Routes of the API: each is served with and without `/v1`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["Endpoint", "api_routes"]

Endpoint = Callable[[Request], Awaitable[Response]]


def api_routes(path: str, endpoint: Endpoint, methods: Sequence[str] = ("POST",)) -> list[Route]:
    """Routes of an endpoint at `/v1` + path and at path."""
    return [Route(prefix + path, endpoint, methods=list(methods)) for prefix in ("/v1", "")]
