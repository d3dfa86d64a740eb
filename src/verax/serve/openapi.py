"""`/openapi.json`: the description of the API, made of the Structs that requests are checked with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from verax.serve.json_response import JsonResponse
from verax.serve.routing import ApiRoute
from verax.serve.server import Server

__all__ = ["describe", "routes"]

_REF = "#/components/schemas/{name}"

_ERRORS = {
    "400": "a field is wrong: `param` names it",
    "401": "no valid API key",
    "404": "no such model or path",
    "413": "the body is too long",
    "415": "the content type is not JSON",
    "429": "the queue is full: try again later",
    "500": "the engine has failed",
    "503": "the server is shutting down",
}


class ErrorObject(msgspec.Struct, kw_only=True):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """Body of every error."""

    error: ErrorObject


def routes(server: Server) -> list[Route]:
    """Route of the description."""

    async def openapi(request: Request) -> Response:
        return JsonResponse(describe(request.app.routes))

    return [Route("/openapi.json", openapi)]


def describe(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """OpenAPI 3.1 description of the API's routes. The page's own routes are no part of it."""
    found = [route for route in routes if isinstance(route, ApiRoute)]
    bodies = {route.body for route in found if route.body is not None}
    kinds = sorted(bodies, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components([*kinds, ErrorAnswer], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in found:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path = route.path_format
            paths.setdefault(path, {})[method.lower()] = _operation(route, method)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "verax",
            "version": version("verax"),
            "description": "Text, video and embedding models over HTTP.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: ApiRoute, method: str) -> dict[str, Any]:
    name = f"{method.lower()}{route.path_format}".replace("/", "_").replace("{", "").replace("}", "")
    error = {"application/json": {"schema": {"$ref": _REF.format(name=ErrorAnswer.__name__)}}}
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary or route.path_format,
        "responses": {
            "200": {"description": "the answer"},
            **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
    }
    if parameters := [_path_parameter(name) for name in route.param_convertors]:
        operation["parameters"] = parameters
    if route.body is not None:
        schema = {"$ref": _REF.format(name=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _path_parameter(name: str) -> Mapping[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
