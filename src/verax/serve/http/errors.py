"""Errors of the HTTP API in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Paths of Anthropic's API have Anthropic's: `{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler, Scope

from verax.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidParameterError,
    QueueFullError,
    RequestRefusedError,
    StructuredOutputError,
    TemplateError,
    VeraxError,
)
from verax.serve.http.telemetry import record_of


class JsonResponse(Response):
    """Answer with a JSON body. Numbers that are not finite, which JSON lacks, become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode an object, a list or a msgspec Struct."""
        return msgspec.json.encode(content)


RETRY_AFTER = 1
"""Seconds after which a client may try again, in the answers 429 and 503."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "unavailable_error",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_ANTHROPIC_PATH = re.compile(r"(/v1)?/messages(/.*)?", re.DOTALL)

_FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*): ")

_log = logging.getLogger("verax.serve")


class ApiError(Exception):
    """Error with an HTTP status.

    `status`: HTTP status, 400 to 599. `message`: text for people. It begins with the name of the field that was wrong,
    if one was. `type`: OpenAI's name of the kind of error; the status's usual one if None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.extra = extra
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER))

    def body(self) -> dict[str, Any]:
        """The error object, as OpenAI's API sends it."""
        shape = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**shape, **self.extra}}


def field_error(param: str, problem: str) -> ApiError:
    """Error 400 of a field: its name, what is wrong with it, and what would be right."""
    return ApiError(400, f"{param}: {problem}", param=param)


def model_error(problem: str) -> ApiError:
    """Error 404 of the field `model`."""
    return ApiError(404, f"model: {problem}", param="model", code="model_not_found")


def api_error(error: BaseException) -> ApiError:
    """The HTTP error of any exception. An unexpected one is logged, and becomes a 500."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full")
        case EngineDeadError():
            return ApiError(500, str(error), code="engine_dead")
        case ContextLengthError():
            return context_error(error, "prompt")
        case StructuredOutputError():
            return ApiError(400, str(error), param="structured_outputs")
        case InvalidParameterError() | RequestRefusedError():
            field = _FIELD.match(str(error))
            return ApiError(400, str(error), param=field[1] if field else None)
        case TemplateError():
            return ApiError(400, f"messages: {error}", param="messages")
        case VeraxError():
            return ApiError(500, str(error))
    _log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal server error; the server's log has more")


def context_error(error: ContextLengthError, param: str) -> ApiError:
    """The HTTP error of a prompt that is too long. `param`: field that the prompt was made of."""
    return ApiError(
        400,
        f"{param}: {str(error).removeprefix('prompt: ')}",
        param=param,
        code="context_length_exceeded",
        n_prompt_tokens=error.num_tokens,
        n_ctx=error.max_model_len,
    )


def is_anthropic(scope: Scope) -> bool:
    """True if a request is for a path of Anthropic's API."""
    return _ANTHROPIC_PATH.fullmatch(scope["path"]) is not None


def error_body(error: ApiError, scope: Scope) -> dict[str, Any]:
    """The error object in the shape of the API that a request is for."""
    if not is_anthropic(scope):
        return error.body()
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    request_id = record_of(scope).request_id
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def error_response(error: BaseException, scope: Scope) -> JsonResponse:
    """Answer to a request that failed, in the shape of the API that the request is for."""
    http = api_error(error)
    return JsonResponse(error_body(http, scope), http.status, http.headers)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Context whose errors name the client's own fields.

    `names`: the client's name of a field, or of the beginning of its path, by the name in an error.

    Raises:
        ApiError: for every error of verax.
    """
    try:
        yield
    except (ApiError, VeraxError) as error:
        http = api_error(error)
        param = http.param or ""
        known = [name for name in names if re.match(rf"{re.escape(name)}(?![\w-])", param)]
        if known:
            name = max(known, key=len)
            http.message = http.message.replace(name, names[name], 1)
            http.param = names[name] + param.removeprefix(name)
        raise http from error


async def _handle(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope)


EXCEPTION_HANDLERS: Mapping[Any, ExceptionHandler] = dict.fromkeys((ApiError, VeraxError, HTTPException), _handle)
"""Starlette's exception handlers: every error leaves in the shape of its API."""
