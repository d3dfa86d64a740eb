"""Routes of the API, each with and without `/v1`, and their description as OpenAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from verax.serve.http.errors import AnthropicErrorAnswer, ErrorAnswer, is_anthropic

__all__ = ["ApiRoute", "Parameter", "api_route", "api_routes", "describe"]

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


_REF = "#/components/schemas/{name}"

_JSON, _EVENTS, _FORM = "application/json", "text/event-stream", "multipart/form-data"

_ERRORS = {
    401: "no valid API key",
    403: "the host or the origin is not allowed",
    404: "no such path, or nothing of this name",
    431: "the headers are too long",
    500: "the engine has failed",
    503: "the server is shutting down",
}
"""Errors of every route."""

_BODY_ERRORS = {413: "the body is too long", 415: "the body has another content type"}

_WRONG = "a field is wrong, and the message begins with its name"

_QUEUE_FULL = "the queue is full: `Retry-After` says when to try again"

_PAST_THE_END = "the range begins past the end of the file"

_REQUEST_ID = {"x-request-id": {"description": "id of the request, as in the log", "schema": {"type": "string"}}}

_RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}


def describe(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """OpenAPI 3.1 description of the API's routes. It leaves out the page's own routes."""
    api = [route for route in routes if isinstance(route, ApiRoute)]
    kinds = {kind for route in api for kind in _kinds(route.described)}
    ordered = sorted(kinds | {ErrorAnswer, AnthropicErrorAnswer}, key=lambda kind: kind.__name__)
    references, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schemas = dict(zip(ordered, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in api:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path_format, {})[method.lower()] = _operation(route, method, schemas, components)
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
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _kinds(described: Described) -> list[type[msgspec.Struct]]:
    return [kind for kind in (described.body, described.answer, *described.parts) if kind is not None]


def _operation(
    route: ApiRoute, method: str, schemas: Mapping[Any, dict[str, Any]], components: Mapping[str, Any]
) -> dict[str, Any]:
    described, path = route.described, route.path_format
    name = f"{method.lower()}{path}".replace("/", "_").replace("{", "").replace("}", "")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": described.summary or path,
        "responses": {
            **_answers(described, schemas),
            **_errors(described, schemas[AnthropicErrorAnswer if is_anthropic({"path": path}) else ErrorAnswer]),
        },
    }
    parameters = [*map(_path_parameter, route.param_convertors), *map(_parameter, described.parameters)]
    if parameters:
        operation["parameters"] = parameters
    if described.body is not None:
        content = {_JSON: {"schema": schemas[described.body]}}
        if described.files:
            content[_FORM] = {"schema": _form(components[described.body.__name__], described.files)}
        operation["requestBody"] = {"required": True, "content": content}
    if path == "/health":
        operation["security"] = []
    return operation


def _answers(described: Described, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """Answers by their status, with content types and schemas."""
    contents: dict[str, Any] = {}
    if described.answer is not None:
        contents[_JSON] = {"schema": schemas[described.answer]}
    if described.streams:
        contents[_EVENTS] = {"schema": {"description": "server-sent events, whose data is JSON"}}
    contents |= {kind: {"schema": {"type": "string"}} for kind in described.media}
    texts = {"200": "the answer"} | ({"206": "a part of the file"} if described.ranges else {})
    return {
        status: {"description": text, "headers": _REQUEST_ID, "content": contents} for status, text in texts.items()
    }


def _errors(described: Described, schema: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(_ERRORS)
    if described.body is not None or described.parameters:
        given[400] = _WRONG
    if described.body is not None:
        given |= _BODY_ERRORS
    if described.queued:
        given[429] = _QUEUE_FULL
    if described.ranges:
        given[416] = _PAST_THE_END
    return {
        str(status): {
            "description": text,
            "headers": _REQUEST_ID | (_RETRY_AFTER if status in (429, 503) else {}),
            "content": {_JSON: {"schema": schema}},
        }
        for status, text in sorted(given.items())
    }


def _form(schema: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any]:
    """Schema of a body as a form: no field is null, and some are files."""
    properties = {name: _without_null(value) for name, value in schema["properties"].items()}
    file = {"type": "string", "format": "binary"}
    properties |= {name: {"anyOf": [file, *properties[name].get("anyOf", ())]} for name in files}
    return {**schema, "properties": properties}


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    if "anyOf" not in schema:
        return dict(schema)
    kept = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    choices = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
    return {**kept, **choices[0]} if len(choices) == 1 else {**kept, "anyOf": choices}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.description,
        "schema": parameter.schema,
    }
