"""HTTP/1.1 of the server: uvicorn's protocol over llhttp, with bounded heads and errors of the one shape."""

from __future__ import annotations

import asyncio
import http
import uuid
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from verax.serve.http.errors import ApiError
from verax.serve.http.middleware import MAX_HEADER_BYTES

__all__ = ["HttpProtocol"]


class HttpProtocol(HttpToolsProtocol):
    """One connection. What is no HTTP, or a head that does not end, is answered here, before there is a request.

    Args:
        header_timeout: seconds from the connection, or the answer before, to the end of a request's headers.
        options: arguments of `HttpToolsProtocol`.
    """

    def __init__(self, *, header_timeout: float, **options: Any):
        super().__init__(**options)
        self._header_timeout = header_timeout
        self._header_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """Bytes of a head that is not complete; -1 behind its end."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin a connection."""
        super().connection_made(transport)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        super().connection_lost(exc)
        if self._header_timer is not None:
            self._header_timer.cancel()

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        super().on_response_complete()
        self._watch_headers()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Hand a request over."""
        self._head_bytes = -1
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        super().data_received(data)
        # The parser holds an unfinished head, however long. The middleware bounds a finished one.
        if self._head_bytes >= 0 and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self._refuse(ApiError(431, f"headers: longer than {MAX_HEADER_BYTES} bytes"))
        self._watch_headers()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(ApiError(400, msg))

    def _watch_headers(self) -> None:
        """Run the timer while no answer is due."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout, self._give_up)

    def _give_up(self) -> None:
        """Close a connection without a request."""
        if self.transport.is_closing():
            return
        if self._head_bytes > 0:
            self._refuse(ApiError(408, f"headers: they did not end within {self._header_timeout:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        head = [
            f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {uuid.uuid4().hex}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()
