"""Routes of the API: each is served with and without `/v1`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["ApiRoute", "Endpoint", "api_route", "api_routes"]

Endpoint = Callable[[Request], Awaitable[Response]]


class ApiRoute(Route):
    """Route with what the description of the API says of it."""

    body: type[msgspec.Struct] | None = None
    summary: str = ""


def api_route(
    path: str,
    endpoint: Endpoint,
    methods: Sequence[str] = ("POST",),
    *,
    body: type[msgspec.Struct] | None = None,
    summary: str = "",
) -> ApiRoute:
    """Route of an endpoint.

    Args:
        path: begins with a slash.
        endpoint: function of a request.
        methods: HTTP methods.
        body: Struct of its JSON body, for the description of the API.
        summary: line for the description of the API.
    """
    route = ApiRoute(path, endpoint, methods=list(methods))
    route.body, route.summary = body, summary
    return route


def api_routes(path: str, endpoint: Endpoint, methods: Sequence[str] = ("POST",), **described: Any) -> list[Route]:
    """Routes of an endpoint at `/v1` + path and at path; the rest as `api_route`."""
    return [api_route(prefix + path, endpoint, methods, **described) for prefix in ("/v1", "")]
