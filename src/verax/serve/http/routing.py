"""Routes of the API: each is served with and without `/v1`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["ApiRoute", "Described", "Endpoint", "Parameter", "api_route", "api_routes"]

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Parameter:
    """Parameter of a request, as the description of the API has it.

    Attributes:
        name: its name.
        schema: its JSON schema.
        place: where it is.
        description: line for people.
    """

    name: str
    schema: Mapping[str, Any]
    place: Literal["query", "header"] = "query"
    description: str = ""


@dataclass(frozen=True)
class Described:
    """Part of the description of the API that is about one route.

    Attributes:
        summary: line for people.
        body: Struct of its JSON body.
        parts: Structs that the body's schema refers to by name, and that no field has as its type.
        files: fields of the body that are files if it comes as a form (`multipart/form-data`); none for JSON only.
        parameters: parameters of the query and the headers.
        answer: Struct of its JSON answer.
        streams: True if it can answer with server-sent events.
        media: other content types of its answer.
        queued: True if a full queue refuses it with 429.
        ranges: True if it can answer with a part of a file.
    """

    summary: str = ""
    body: type[msgspec.Struct] | None = None
    parts: tuple[type[msgspec.Struct], ...] = ()
    files: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    answer: type[msgspec.Struct] | None = None
    streams: bool = False
    media: tuple[str, ...] = ()
    queued: bool = False
    ranges: bool = False


class ApiRoute(Route):
    """Route with what the description of the API says of it."""

    described: Described = Described()


def api_route(path: str, endpoint: Endpoint, methods: Sequence[str] = ("POST",), **described: Any) -> ApiRoute:
    """Route of an endpoint.

    Args:
        path: begins with a slash.
        endpoint: function of a request.
        methods: HTTP methods.
        described: fields of `Described`.
    """
    route = ApiRoute(path, endpoint, methods=list(methods))
    route.described = Described(**described)
    return route


def api_routes(path: str, endpoint: Endpoint, methods: Sequence[str] = ("POST",), **described: Any) -> list[Route]:
    """Routes of an endpoint at `/v1` + path and at path; the rest as `api_route`."""
    return [api_route(prefix + path, endpoint, methods, **described) for prefix in ("/v1", "")]
