"""Requests to an ASGI application in this process: what a client would send over a socket, without one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

__all__ = ["Answer", "call"]

_HOST = b"localhost"
"""Name that a server at a loopback address accepts."""


@dataclass(frozen=True)
class Answer:
    """Whole answer of the application."""

    status: int
    headers: Headers
    body: bytes


async def call(app: ASGIApp, method: str, path: str, body: bytes = b"") -> Answer:
    """Answer to a request. Cancelling the task ends the request, as a client does that disconnects.

    Args:
        app: the application, whose lifespan is entered.
        method: HTTP method.
        path: path without a query.
        body: JSON text in UTF-8, if the method has one.
    """
    headers = [(b"host", _HOST), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
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
