"""Lines of OpenAI's batch files: a request of the input, and an answer of the output.

The format is that of https://platform.openai.com/docs/api-reference/batch.
"""

from __future__ import annotations

import secrets
from typing import Any, ClassVar, Literal

import msgspec

from verax.batch.results import LineError, bad_line
from verax.serve.http.body import decode
from verax.serve.http.errors import ApiError

__all__ = [
    "ID_PREFIX",
    "URLS",
    "VIDEOS",
    "AnswerLine",
    "LineResponse",
    "RequestLine",
    "read_request",
]

VIDEOS = "/v1/videos"
URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    VIDEOS,
)
"""Endpoints of the server that a line may be for."""

ID_PREFIX = "batch_req_"


class RequestLine(msgspec.Struct, frozen=True):
    """Request of a line.

    Attributes:
        number: of the line, from 1.
        custom_id: the user's name for it.
        url: one of `URLS`.
        body: JSON object, as it stands in the line.
    """

    number: int
    custom_id: str
    url: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct, frozen=True):
    """The server's answer to a request."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class AnswerLine(msgspec.Struct, frozen=True):
    """Line of the output: a response, which may be an HTTP error, or the reason why none was asked for."""

    BEGIN: ClassVar[bytes] = b'{"id":"%b' % ID_PREFIX.encode()

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None

    @classmethod
    def of(cls, custom_id: str, response: LineResponse) -> AnswerLine:
        """The server's answer, with an id of its own."""
        return cls(_new_id(), custom_id, response, None)

    @classmethod
    def failure(cls, error: LineError, custom_id: str | None = None) -> AnswerLine:
        """Answer to a line that is no request, with an id of its own."""
        return cls(_new_id(), custom_id, None, error)

    @property
    def failed(self) -> bool:
        """True unless the server answered with what was asked for. A clip can fail after its request was accepted."""
        response = self.response
        if response is None or response.status_code >= 400:
            return True
        return msgspec.json.decode(response.body, type=_AnswerBody).error is not None


class _AnswerBody(msgspec.Struct):
    error: Any = None


class _Fields(msgspec.Struct):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _RequestBody(msgspec.Struct):
    """The only field of a body that is looked at here; all others are the server's business."""

    stream: Any = None


def read_request(text: bytes, number: int) -> RequestLine | AnswerLine:
    """Request of a line, or the answer that says what is wrong with the line.

    Args:
        text: the line, in UTF-8.
        number: of the line, from 1.
    """
    custom_id = None
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        given: dict[str, Any] = {
            name: msgspec.json.decode(raw[name]) for name in ("custom_id", "method", "url") if name in raw
        }
        if isinstance(given.get("custom_id"), str):
            custom_id = given["custom_id"]
        if "body" in raw:
            given["body"] = raw["body"]
        fields = decode(_Fields, given)
        if fields.url not in URLS:
            raise ApiError(400, f"url: expected one of {', '.join(URLS)}, got {fields.url[:100]!r}", param="url")
        if _streams(fields.body):
            raise ApiError(400, "body.stream: an answer in a file is a whole one; leave it out", param="body.stream")
    except ApiError as error:
        return AnswerLine.failure(bad_line("invalid_request", error.message, number, error.param), custom_id)
    except msgspec.ValidationError:
        problem = "expected a JSON object with custom_id, method, url and body"
        return AnswerLine.failure(bad_line("invalid_json_line", problem, number))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        return AnswerLine.failure(bad_line("invalid_json_line", f"it is not valid JSON: {error}", number), custom_id)
    return RequestLine(number, fields.custom_id, fields.url, fields.body)


def _new_id() -> str:
    return f"{ID_PREFIX}{secrets.token_hex(16)}"


def _streams(body: msgspec.Raw) -> bool:
    try:
        return msgspec.json.decode(body, type=_RequestBody).stream is True
    except msgspec.ValidationError as error:
        raise ApiError(400, "body: expected a JSON object", param="body") from error
