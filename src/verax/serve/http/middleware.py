"""Middleware around every request: its id and log line, who may call, and the size of its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verax.serve.http.errors import ApiError, error_response, is_anthropic
from verax.serve.http.sse import READ_FIRST, ClientDisconnectedError
from verax.serve.http.telemetry import ACCESS, RECORD, RequestRecord

if TYPE_CHECKING:
    from verax.serve.http.server import Server

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")

_VIDEO_PATHS = ("/v1/videos", "/videos")

_ALWAYS_SERVED = ("/health", "/metrics")
"""Paths that are answered while the server drains."""

MAX_HEADER_BYTES = 16 << 10
"""Bytes of a request's headers."""

MIN_BODY_RATE = 10 << 10
"""Bytes of a body that each second beyond the server's `slow_client_timeout` needs."""

CLIENT_CLOSED = 499
"""Status in the log of a request whose client went away before the answer, as in nginx."""

_log = logging.getLogger(ACCESS)


class Layer:
    """Layer around an application. What is not a request, such as the beginning and end of the process, passes."""

    def __init__(self, app: ASGIApp, server: Server):
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        await (self.serve if scope["type"] == "http" else self._app)(scope, receive, send)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an HTTP request."""
        raise NotImplementedError


class RequestLog(Layer):
    """Outer layer: gives each request an id, counts it, turns every exception into an answer, and logs one line."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an HTTP request."""
        given = Headers(scope=scope).get("x-request-id", "")
        record = RequestRecord(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
        scope[RECORD] = record
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if is_anthropic(scope):
                    headers["request-id"] = record.request_id  # the name that Anthropic's clients read
            await send(message)

        counted = scope["path"] not in _ALWAYS_SERVED
        self._server.num_requests += counted
        try:
            if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEADER_BYTES:
                raise ApiError(431, f"headers: longer than {MAX_HEADER_BYTES} bytes", headers={"Connection": "close"})
            if counted and self._server.draining:
                raise ApiError(503, "the server is shutting down; try again later", code="draining")
            await self._app(scope, receive, send_with_id)
        except (ClientDisconnectedError, ClientDisconnect):  # before the answer, or within the request's body
            status = CLIENT_CLOSED
        except Exception as error:
            answer = error_response(error, scope)
            if status:
                raise  # the answer has begun: the connection is closed
            await answer(scope, receive, send_with_id)
        finally:
            self._server.num_requests -= counted
            self._write(scope, record, status or CLIENT_CLOSED)
            if counted and self._server.tracer is not None:
                self._server.tracer.record(scope, record, status or CLIENT_CLOSED)

    def _write(self, scope: Scope, record: RequestRecord, status: int) -> None:
        line: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "duration": round(time.perf_counter() - record.begin, 4),
            "request_id": record.request_id,
        }
        for name in ("model", "prompt_tokens", "completion_tokens", "prompt"):
            if (value := getattr(record, name)) is not None:
                line[name] = value
        if record.ttft is not None:
            line["ttft"] = round(record.ttft, 4)
        _log.info("request", extra={"fields": line})


class BodyLimit(Layer):
    """Refuses bodies that are too long or come too slowly, without reading them to their end."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an HTTP request."""
        settings = self._server.settings
        video = any(scope["path"] == path or scope["path"].startswith(path + "/") for path in _VIDEO_PATHS)
        limit = settings.max_video_body_bytes if video else settings.max_body_bytes
        for name in ("content-encoding", "transfer-encoding"):
            if (coding := Headers(scope=scope).get(name, "").strip().lower()) not in ("", "identity", "chunked"):
                problem = f"{name}: {coding[:100]!r} is not read; send the body without it"
                raise ApiError(415, problem, param=name, headers={"Connection": "close"})
        too_long = ApiError(413, f"body: longer than {limit} bytes", param="body", headers={"Connection": "close"})
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise too_long
        read, complete, begin = 0, False, asyncio.get_running_loop().time()
        patience = settings.slow_client_timeout

        async def receive_bounded() -> Message:
            nonlocal read, complete
            if complete:  # the client may wait for its answer as long as it likes
                return await receive()
            try:
                message = await _receive_until(begin + patience + read / MIN_BODY_RATE, receive)
            except TimeoutError:
                problem = f"body: {read} bytes came in {patience:g} s or more, which is too slow"
                raise ApiError(408, problem, param="body", headers={"Connection": "close"}) from None
            complete = message["type"] != "http.request" or not message.get("more_body")
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > limit:
                    raise too_long
            return message

        await self._app(scope, receive_bounded, send)


async def _receive_until(deadline: float, receive: Receive) -> Message:
    loop = asyncio.get_running_loop()
    due = max(deadline, loop.time())
    try:
        async with asyncio.timeout_at(deadline):
            return await receive()
    except TimeoutError:
        if loop.time() - due < READ_FIRST:
            raise
        async with asyncio.timeout(READ_FIRST):  # the event loop stood still, and the client may have been in time
            return await receive()


_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class Security(Layer):
    """Checks the host, the origin and the API key of each request before anything else sees it.

    A page of another site can make a browser send requests to this server. Its origin gives it away. A name that the
    site's owner points at 127.0.0.1 (DNS rebinding) gives itself away as the host.
    """

    def __init__(self, app: ASGIApp, server: Server):
        super().__init__(app, server)
        settings = server.settings
        self._keys = [_digest(key) for key in settings.api_keys]
        own = {settings.host.lower(), *_LOOPBACK_NAMES} if is_loopback(settings.host) else set()
        self._hosts = frozenset({*own, *(host.lower() for host in settings.allowed_hosts)})

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that passes; 401 or 403 for others."""
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        self._check_origin(headers)
        if not _is_public(scope):
            self._check_key(headers)
        await self._app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        # A server on all addresses is known by names that it does not know itself: those are checked only if given.
        if self._hosts and _hostname(host) not in self._hosts:
            problem = f"host: {host[:100]!r} is not served here; --allowed-hosts adds names"
            raise ApiError(403, problem, param="host", code="host")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self._server.settings.allowed_origins:
            return
        if origin.lower().partition("://")[2] != headers.get("host", "").lower():
            problem = f"origin: {origin[:100]!r} may not call this server; --allowed-origins adds origins"
            raise ApiError(403, problem, param="origin", code="origin")

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        # All keys are compared, so that the time says nothing about which of them was near.
        if not sum(hmac.compare_digest(digest, key) for key in self._keys):
            raise ApiError(
                401,
                "authorization: a valid API key is needed, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`",
                param="authorization",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a server at this address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_public(scope: Scope) -> bool:
    """True for paths that need no key: the health, and the page's own files, which hold nothing of anyone."""
    path = scope["path"]
    files = scope["method"] in ("GET", "HEAD") and (path == "/" or path.startswith("/static/"))
    return path == "/health" or files


def _hostname(host: str) -> str:
    """Host of a Host header, without its port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
