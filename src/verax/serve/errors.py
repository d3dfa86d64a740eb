"""Errors of the HTTP API, all in OpenAI's one shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

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
from verax.serve.json_response import JsonResponse

__all__ = ["EXCEPTION_HANDLERS", "ApiError", "api_error", "context_error"]

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
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*): ")

_log = logging.getLogger("verax.serve")


class ApiError(Exception):
    """Error with an HTTP status.

    Args:
        status: HTTP status, 400 to 599.
        message: text for people. It begins with the name of the field that was wrong, if one was.
        type: OpenAI's name of the kind of error; that of the status if None.
        param: name of the field that was wrong.
        code: OpenAI's name of the very error.
        headers: further headers of the answer.
        extra: further keys of the error object.
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
        """The error object as it is sent."""
        shape = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**shape, **self.extra}}

    def response(self) -> JsonResponse:
        """The error as an answer."""
        return JsonResponse(self.body(), self.status, self.headers)


def api_error(error: BaseException) -> ApiError:
    """The HTTP error of any exception. One that is no error of ours or of the client's is logged, and becomes a 500."""
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
            found = _FIELD.match(str(error))
            return ApiError(400, str(error), param=found[1] if found else None)
        case TemplateError():
            return ApiError(400, f"messages: {error}", param="messages")
        case VeraxError():
            return ApiError(500, str(error))
    _log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal server error; the server's log has more")


def context_error(error: ContextLengthError, param: str) -> ApiError:
    """The HTTP error of a prompt that is too long.

    Args:
        error: the engine's.
        param: field that the prompt was made of.
    """
    return ApiError(
        400,
        f"{param}: {str(error).removeprefix('prompt: ')}",
        param=param,
        code="context_length_exceeded",
        n_prompt_tokens=error.num_tokens,
        n_ctx=error.max_model_len,
    )


async def _handle(request: Request, error: Exception) -> Response:
    return api_error(error).response()


EXCEPTION_HANDLERS: Mapping[Any, ExceptionHandler] = dict.fromkeys((ApiError, VeraxError, HTTPException), _handle)
"""Starlette's exception handlers: every error leaves in the one shape."""
