"""HTTP/1.1 as far as a load test needs it: where a server is, what is sent to it, and the bodies of its responses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from verax.bench.serve.traffic import Request
from verax.errors import InvalidParameterError, VeraxError

__all__ = ["Body", "Target", "fetch"]


@dataclass(frozen=True)
class Target:
    """Server to load, and what every request to it says."""

    host: str
    port: int
    path: str = "/v1"
    """Prefix of the API's routes."""
    model: str | None = None
    api_key: str | None = None

    @classmethod
    def of(cls, url: str, *, api_key: str | None = None) -> Target:
        """Target of a base URL such as `http://127.0.0.1:8000/v1`.

        Raises:
            InvalidParameterError: if it is no http URL with a host.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InvalidParameterError(f"url: expected one such as http://127.0.0.1:8000/v1, got {url!r}")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/"), api_key=api_key)

    def head(self, method: str, path: str, length: int = 0, *, request_id: str | None = None) -> bytes:
        """Request line and headers."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        lines += [f"X-Request-Id: {request_id}"] if request_id else []
        lines += ["Content-Type: application/json", f"Content-Length: {length}"] if length else []
        return "\r\n".join([*lines, "", ""]).encode()

    def completion(self, request: Request, request_id: str | None = None) -> bytes:
        """Whole HTTP request of a streamed, greedy completion of a fixed number of tokens."""
        fields = {
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,  # the whole answer is compared
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = msgspec.json.encode(fields | ({"model": self.model} if self.model else {}))
        return self.head("POST", f"{self.path}/completions", len(body), request_id=request_id) + body


class Body:
    """HTTP response read piece by piece: the status, then the body with its chunks joined."""

    def __init__(self) -> None:
        self.status = 0
        """Status of the response; 0 before its head is whole."""
        self._chunked = False
        self._pending = b""
        self._left = 0  # bytes of the current chunk

    def feed(self, data: bytes) -> bytes:
        """Next bytes of the body.

        Raises:
            ValueError: if this is not HTTP.
        """
        data = self._pending + data
        self._pending = b""
        if not self.status:
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                self._pending = head
                return b""
            self.status = int(head[9:12])
            self._chunked = b"transfer-encoding: chunked" in head.lower()
        return self._unchunk(data) if self._chunked else data

    def _unchunk(self, data: bytes) -> bytes:
        pieces, position = [], 0
        while position < len(data):
            if self._left:
                piece = data[position : position + self._left]
                pieces.append(piece)
                position += len(piece)
                self._left -= len(piece)
                continue
            begin = position + 2 if data.startswith(b"\r\n", position) else position  # the end of the chunk before
            end = data.find(b"\r\n", begin)
            if end < 0:
                self._pending = data[position:]
                break
            self._left = int(data[begin:end], 16)
            position = end + 2
            if not self._left:  # the last chunk; trailers are nobody's
                break
        return b"".join(pieces)


async def fetch(target: Target, path: str, *, body: object = None, timeout: float = 10.0) -> str:
    """Text of a GET, or of a POST.

    Args:
        target: its host, port and key.
        path: of the resource, from the root.
        body: JSON of a POST; None for a GET.
        timeout: in seconds.

    Raises:
        VeraxError: if the server does not answer, or with another status than 200.
    """
    where = f"http://{target.host}:{target.port}{path}"
    sent = b"" if body is None else msgspec.json.encode(body)
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(target.host, target.port)
            try:
                writer.write(target.head("POST" if sent else "GET", path, len(sent)) + sent)
                parts = Body()
                text = parts.feed(await reader.read())
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise VeraxError(f"{where}: {error or type(error).__name__}") from error
    if parts.status != 200:
        raise VeraxError(f"{where}: status {parts.status}: {text[:200].decode(errors='replace')}")
    return text.decode(errors="replace")
