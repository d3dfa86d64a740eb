"""The process of a server: its socket, its signals, and its end."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from verax.errors import InvalidParameterError
from verax.serve.app import create_app
from verax.serve.errors import ApiError
from verax.serve.middleware import MAX_HEADER_BYTES
from verax.serve.server import Server
from verax.serve.settings import ServerSettings

__all__ = ["bind", "run"]

LAST_ANSWERS = 2.0
"""Seconds for the last bytes of answers to be sent, once nothing runs any more."""


def bind(settings: ServerSettings) -> socket.socket:
    """A socket at the server's address. Connections are refused until `run`.

    Raises:
        InvalidParameterError: if the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InvalidParameterError(
            f"port: cannot listen at {settings.host} port {settings.port}: {error.strerror or error}; --port 0 takes a "
            "free one"
        ) from error
    return listener


def run(server: Server, listener: socket.socket, on_start: Callable[[str], None] | None = None) -> int:
    """Serve until a signal ends it.

    SIGTERM and SIGINT let running requests finish for `settings.shutdown_timeout` seconds; a second one ends at once.

    Args:
        server: the engines and their settings.
        listener: what `bind` gave; closed at the end.
        on_start: function that is called with the base URL once connections are accepted.

    Returns:
        Exit status: 0, or 1 if the engine has failed.
    """
    process = _Process(server, on_start and (lambda: on_start(_url(server.settings, listener))))
    try:
        asyncio.run(process.serve(sockets=[listener]))
    finally:
        listener.close()
    return process.status


class _Http(H11Protocol):
    """HTTP/1.1 whose own errors have the one shape, too, and whose clients have a limited time for their headers.

    Args:
        header_timeout: seconds from the connection, or the answer before, to the end of a request's headers.
        options: arguments of `H11Protocol`.
    """

    def __init__(self, *, header_timeout: float, **options: Any):
        super().__init__(**options)
        self._header_timeout = header_timeout
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._header_timer is not None:
            self._header_timer.cancel()

    def _watch_headers(self) -> None:
        """Run the timer while no answer is due."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout, self._give_up)

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:  # a request has begun
            self._refuse(408, f"headers: they did not end within {self._header_timeout:g} s")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        body = msgspec.json.encode(ApiError(status, message).body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", uuid.uuid4().hex.encode()),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()


class _Process(uvicorn.Server):
    """uvicorn's server, which goes on answering while running requests finish."""

    def __init__(self, server: Server, on_start: Callable[[], None] | None):
        super().__init__(
            uvicorn.Config(
                create_app(server),
                # uvicorn calls what it is given, though it declares a class.
                http=cast(Any, partial(_Http, header_timeout=server.settings.slow_client_timeout)),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_graceful_shutdown=round(LAST_ANSWERS),
            )
        )
        self.status = 0
        self._server = server
        self._on_start = on_start
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, at the first signal; end at once, at the second."""
        if self._server.draining:
            self.should_exit = self.force_exit = True
        self._server.draining = True
        self._deadline = time.monotonic() + self._server.settings.shutdown_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        if self._on_start is not None:
            self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Look for a reason to end, ten times a second."""
        return await super().on_tick(counter) or await self._has_ended()

    async def _has_ended(self) -> bool:
        server, llm = self._server, self._server.llm
        if llm is not None and llm.error is not None and self.status == 0:
            self.status = 1
            server.draining = True
            self._deadline = time.monotonic() + LAST_ANSWERS  # its requests have failed: their answers are short
        if self._deadline is None:
            return False
        if server.num_requests == 0:
            return True
        if time.monotonic() < self._deadline:
            return False
        if llm is not None and llm.is_running:
            # The rest is aborted, and says so to its clients.
            await llm.shutdown()
            self._deadline = time.monotonic() + LAST_ANSWERS
            return False
        return True


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"
