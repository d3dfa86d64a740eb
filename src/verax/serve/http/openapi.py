"""Routes of the API, each with and without `/v1`, and their description as OpenAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from verax.serve.http.body import read_body
from verax.serve.http.errors import JsonResponse, is_anthropic
from verax.serve.http.sse import unless_disconnected
from verax.serve.http.telemetry import RequestRecord, record_of

JSON, EVENTS, FORM = "application/json", "text/event-stream", "multipart/form-data"

Endpoint = Callable[[Request], Awaitable[Response]]

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True)
class Parameter:
    """Parameter of a request: its name, its JSON schema, where it is, and a line for people."""

    name: str
    schema: Mapping[str, Any]
    place: Literal["query", "header", "path"] = "query"
    description: str = ""


class ApiRoute(Route):
    """Route with what the description of the API says about it.

    Args:
        parts: Structs that the body's schema refers to by name, and that no field has as its type.
        files: fields of the body that are files if it comes as a form; none if it is always JSON.
        queued: True if a full queue refuses it with 429.
        ranges: True if it can answer with a part of a file.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        methods: Sequence[str] = ("POST",),
        *,
        summary: str,
        body: type[msgspec.Struct] | None = None,
        parts: Sequence[type[msgspec.Struct]] = (),
        files: Sequence[str] = (),
        parameters: Sequence[Parameter] = (),
        media: Sequence[str] = (JSON,),
        queued: bool = False,
        ranges: bool = False,
    ):
        super().__init__(path, endpoint, methods=list(methods))
        self.summary, self.body, self.parts, self.files = summary, body, parts, files
        self.media, self.queued, self.ranges = media, queued, ranges
        path_schema = {"type": "string", "minLength": 1}
        self.parameters = [*(Parameter(name, path_schema, "path") for name in self.param_convertors), *parameters]


def api_routes(
    path: str,
    endpoint: Endpoint,
    methods: Sequence[str] = ("POST",),
    *,
    prefixes: Sequence[str] = ("/v1", ""),
    **described: Any,
) -> list[Route]:
    """Routes of an endpoint at each prefix + path; the other arguments go to `ApiRoute`."""
    return [ApiRoute(prefix + path, endpoint, methods, **described) for prefix in prefixes]


def json_routes(
    path: str, body: type[T], answer: Callable[[T, RequestRecord], Coroutine[Any, Any, Any]], **described: Any
) -> list[Route]:
    """Routes, as of `api_routes`, whose answer is made of the body and the request's record."""

    async def respond(http: Request) -> Response:
        request = await read_body(http, body)
        return JsonResponse(await unless_disconnected(http, answer(request, record_of(http.scope))))

    return api_routes(path, respond, body=body, **described)


_REF = "#/components/schemas/{name}"

_ERRORS = {
    400: "a field is wrong, and the message begins with its name",
    401: "no valid API key",
    403: "the host or the origin is not allowed",
    404: "no such path, or nothing of this name",
    413: "the body is too long",
    415: "the body has another content type",
    416: "the range begins past the end of the file",
    429: "the queue is full: `Retry-After` says when to try again",
    431: "the headers are too long",
    500: "the engine has failed",
    503: "the server is shutting down",
}

_REQUEST_ID = {"x-request-id": {"description": "id of the request, as in the log", "schema": {"type": "string"}}}

_RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}

_ERROR_SCHEMAS = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT),
}

_ANSWERS: dict[str, dict[str, Any]] = {
    JSON: {"type": "object"},
    EVENTS: {"description": "server-sent events, whose data is JSON"},
}
"""Schemas of answers by their content type; text otherwise. The answers' fields are documented by whose API it is."""


def describe(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """OpenAPI 3.1 description of the API's routes. It leaves out the page's own routes."""
    api = [route for route in routes if isinstance(route, ApiRoute)]
    kinds = {kind for route in api for kind in (route.body, *route.parts) if kind is not None}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in api:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path_format, {})[method.lower()] = _operation(route, method.lower(), components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "verax",
            "version": version("verax"),
            "description": "Text, video and embedding models over HTTP.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, **_ERROR_SCHEMAS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _operation(route: ApiRoute, method: str, components: Mapping[str, Any]) -> dict[str, Any]:
    path = route.path_format
    operation: dict[str, Any] = {
        "operationId": f"{method}{path}".replace("/", "_").replace("{", "").replace("}", ""),
        "summary": route.summary,
        "responses": {**_answers(route), **_errors(route)},
        "parameters": [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.place == "path",
                "description": parameter.description,
                "schema": parameter.schema,
            }
            for parameter in route.parameters
        ],
    }
    if route.body is not None:
        name = route.body.__name__
        content = {JSON: {"schema": {"$ref": _REF.format(name=name)}}}
        if route.files:
            content[FORM] = {"schema": _form(components[name], route.files)}
        operation["requestBody"] = {"required": True, "content": content}
    if path == "/health":
        operation["security"] = []
    return operation


def _answers(route: ApiRoute) -> dict[str, Any]:
    """Answers by their status, with content types and schemas."""
    content = {media: {"schema": _ANSWERS.get(media, _TEXT)} for media in route.media}
    texts = {"200": "the answer"} | ({"206": "a part of the file"} if route.ranges else {})
    return {status: {"description": text, "headers": _REQUEST_ID, "content": content} for status, text in texts.items()}


def _errors(route: ApiRoute) -> dict[str, Any]:
    has_body = route.body is not None
    takes_fields = has_body or any(parameter.place != "path" for parameter in route.parameters)
    possible = {400: takes_fields, 413: has_body, 415: has_body, 416: route.ranges, 429: route.queued}
    name = "AnthropicError" if is_anthropic({"path": route.path_format}) else "Error"
    return {
        str(status): {
            "description": text,
            "headers": _REQUEST_ID | (_RETRY_AFTER if status in (429, 503) else {}),
            "content": {JSON: {"schema": {"$ref": _REF.format(name=name)}}},
        }
        for status, text in _ERRORS.items()
        if possible.get(status, True)
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
