"""Requests in OpenAI's batch format, answered by the server's application without a socket.

The format is defined at https://platform.openai.com/docs/api-reference/batch.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from verax._optional import require_optional
from verax.batch.lines import Line, LineError, ParquetLines, bad_line, write_rows
from verax.batch.results import ResultLine
from verax.errors import EngineDeadError
from verax.files import atomic_path
from verax.serve.app import create_app
from verax.serve.http.body import decode
from verax.serve.http.errors import ApiError, field_error
from verax.serve.http.server import Server

VIDEOS = "/v1/videos"
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", VIDEOS)
"""Endpoints of the server that a line may be for."""

ID_PREFIX = "batch_req_"


@dataclass(frozen=True)
class RequestLine(Line):
    """Request of a line. `url`: one of `URLS`. `body`: JSON object, unchanged."""

    url: str
    body: bytes


class LineResponse(msgspec.Struct, frozen=True):
    """The server's answer to a request."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class AnswerLine(ResultLine, msgspec.Struct, frozen=True):
    """Line of the output: a response, which may be an HTTP error, or the reason why none was asked for."""

    BEGIN: ClassVar[bytes] = b'{"id":"%b' % ID_PREFIX.encode()

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None

    @classmethod
    def of(cls, custom_id: str, response: LineResponse) -> AnswerLine:
        """The server's answer, with an id of its own."""
        return cls(f"{ID_PREFIX}{secrets.token_hex(16)}", custom_id, response, None)

    @classmethod
    def failure(cls, error: LineError, custom_id: str | None = None) -> AnswerLine:
        """Answer to a line that is not a request, with an id of its own."""
        return cls(f"{ID_PREFIX}{secrets.token_hex(16)}", custom_id, None, error)

    @property
    def failed(self) -> bool:
        """True unless the server answered with what was asked for. A clip can fail after its request was accepted."""
        response = self.response
        if response is None or response.status_code >= 400:
            return True
        return msgspec.json.decode(response.body, type=BodyFacts).error is not None


class BodyFacts(msgspec.Struct):
    """The few fields of bodies that a batch looks at; all others are the server's business."""

    stream: Any = None
    error: Any = None
    usage: Any = None
    id: Any = None
    status: Any = None


class _Fields(msgspec.Struct):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


def read_request(text: bytes, number: int) -> RequestLine | AnswerLine:
    """Request of a line, or the answer that says what is wrong with the line.

    `text`: the line, in UTF-8. `number`: of the line, from 1.
    """
    custom_id = None
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        names = ("custom_id", "method", "url")
        given: dict[str, Any] = {name: msgspec.json.decode(raw[name]) for name in names if name in raw}
        if isinstance(given.get("custom_id"), str):
            custom_id = given["custom_id"]
        if "body" in raw:
            given["body"] = raw["body"]
        fields = decode(_Fields, given)
        if fields.url not in URLS:
            raise field_error("url", f"expected one of {', '.join(URLS)}, got {fields.url[:100]!r}")
        try:
            streams = msgspec.json.decode(fields.body, type=BodyFacts).stream is True
        except msgspec.ValidationError as error:
            raise field_error("body", "expected a JSON object") from error
        if streams:
            raise field_error("body.stream", "an answer in a file is a whole one; leave it out")
    except ApiError as error:
        return AnswerLine.failure(bad_line("invalid_request", error.message, number, error.param), custom_id)
    except msgspec.ValidationError:
        problem = "expected a JSON object with custom_id, method, url and body"
        return AnswerLine.failure(bad_line("invalid_json_line", problem, number))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        return AnswerLine.failure(bad_line("invalid_json_line", f"it is not valid JSON: {error}", number), custom_id)
    return RequestLine(number, fields.custom_id, fields.url, bytes(fields.body))


def request_lines(path: Path) -> ParquetLines:
    """Rows of a Parquet file as lines: `custom_id`, `method`, `url` and `body`, which is a struct or JSON text."""
    return ParquetLines(path, ("custom_id", "method", "url", "body"), json=("body",))


def write_answers(lines: Path, path: Path) -> None:
    """Write the answers of a file of lines as Parquet, whole or not at all.

    Columns are `id`, `custom_id`, `status_code`, `request_id`, `body` and `error`; the last two are JSON text.

    `lines`: the file that `ResultFile` wrote.
    """
    arrow = require_optional("pyarrow")
    names = ("id", "custom_id", "status_code", "request_id", "body", "error")

    def row(line: bytes) -> dict[str, Any]:
        answer = msgspec.json.decode(line, type=AnswerLine)
        values: dict[str, Any] = {"id": answer.id, "custom_id": answer.custom_id}
        if answer.response is not None:
            values |= {"status_code": answer.response.status_code, "request_id": answer.response.request_id}
            values["body"] = bytes(answer.response.body).decode()
        if answer.error is not None:
            values["error"] = msgspec.json.encode(answer.error).decode()
        return values

    write_rows(lines, path, {**dict.fromkeys(names, arrow.string()), "status_code": arrow.int32()}, row)


@dataclass(frozen=True)
class Answer:
    """Whole answer of the application."""

    status: int
    headers: Headers
    body: bytes


async def call(app: ASGIApp, method: str, path: str, body: bytes = b"") -> Answer:
    """Answer of an ASGI application in this process. Cancelling the task ends the request, as a disconnect does.

    `app`: the application, whose lifespan is entered. `path`: path without a query. `body`: JSON text in UTF-8, if the
    method has one.
    """
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    scope: Scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""},
        **{"method": method, "path": path, "raw_path": path.encode(), "query_string": b""},
        **{"headers": Headers(headers).raw, "client": None, "server": None},
    }
    unread = [body]
    start: Message = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if not unread:
            await asyncio.get_running_loop().create_future()  # this client does not disconnect
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(start["status"], Headers(raw=start["headers"]), b"".join(parts))


class BatchServer(Protocol):
    """Models that answer the lines of a batch: of this process, or replicas."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Context in which requests are answered."""
        ...

    async def answer(self, request: RequestLine, clips: Path | None) -> Answer:
        """Answer to a line, as `LocalServer` gives it."""
        ...


class LocalServer:
    """Models of this process, as a batch calls them."""

    def __init__(self, server: Server):
        self._server = server
        self._app = create_app(server)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Context in which requests are answered; the engine stops at its end."""
        return self._server.lifespan(self._app)

    async def answer(self, request: RequestLine, clips: Path | None) -> Answer:
        """Answer to a line. Cancelling the task ends the request.

        `clips`: folder for clips. None if there can be none in this batch.

        Raises:
            EngineDeadError: if the text engine has failed, whose answer this would be.
        """
        answer = await call(self._app, "POST", request.url, request.body)
        if request.url == VIDEOS and clips is not None and answer.status < 400:
            return await self._clip(msgspec.json.decode(answer.body, type=BodyFacts).id, clips)
        llm = self._server.llm
        if answer.status >= 500 and llm is not None and llm.error is not None:
            raise EngineDeadError(f"the engine has failed: {llm.error}") from llm.error
        return answer

    async def _clip(self, name: str, folder: Path) -> Answer:
        """The state of a clip once it is made or has failed. Its file is moved into a folder."""
        path = f"{VIDEOS}/{name}"
        await call(self._app, "GET", f"{path}/events")  # they end with the clip
        state = await call(self._app, "GET", path)
        if msgspec.json.decode(state.body, type=BodyFacts).status == "completed":
            content = await call(self._app, "GET", f"{path}/content")
            folder.mkdir(exist_ok=True)
            with atomic_path(folder / f"{name}.mp4") as partial:
                partial.write_bytes(content.body)
        await call(self._app, "DELETE", path)  # frees its place
        return state
