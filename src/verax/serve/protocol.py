"""HTTP/1.1 of the server: uvicorn's protocol over llhttp, with bounded heads and errors of the one shape."""

from __future__ import annotations

import http
import uuid

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from verax.serve.errors import ApiError
from verax.serve.middleware import MAX_HEADER_BYTES

__all__ = ["HttpProtocol"]


class HttpProtocol(HttpToolsProtocol):
    """One connection. What is no HTTP, or a head that does not end, is answered here, before there is a request."""

    _head_bytes = 0
    """Bytes of a head that is not complete; -1 behind its end."""

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

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(ApiError(400, msg))

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
