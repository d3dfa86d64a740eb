"""The process of a server: its socket, its connections, its signals, and its end."""

from __future__ import annotations

import asyncio
import gc
import http
import socket
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, cast

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from verax.errors import InvalidParameterError
from verax.serve.app import create_app
from verax.serve.http.errors import ApiError
from verax.serve.http.middleware import MAX_HEADER_BYTES
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.serve.http.sse import READ_FIRST

try:
    import uvloop
except ImportError:  # it does not exist for Windows
    uvloop = None


KEEP_ALIVE = 75
"""Seconds for which an unused connection stays open: longer than clients and proxies keep theirs (httpx 5, aiohttp 15,
nginx and load balancers 60), so that none sends a request into a connection that is being closed."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. Bytes that are not HTTP, or a head that does not end, are answered here, before a request exists.

    A timer closes its connection `READ_FIRST` later, since closing one with a request unread breaks that request.

    `header_timeout`: seconds from the connection, or a request's first byte, to the end of its headers. `options`:
    arguments of `HttpToolsProtocol`.
    """

    def __init__(self, *, header_timeout: float, **options: Any):
        super().__init__(**options)
        self._header_timeout = header_timeout
        self._header_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """Bytes of a head that is not complete; -1 once it is complete."""
        self._begun = 0
        """Messages in the newest bytes of the client, with one whose body continues there."""
        self._read = b""
        """Newest bytes of the client."""
        self._overhead = 0
        """Bytes after the head that are not of a body: chunk extensions and trailers."""
        self._served: RequestResponseCycle | None = None
        """Request that is being answered; `cycle` is the newest one, which may wait for that."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin a connection."""
        super().connection_made(transport)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        super().connection_lost(exc)
        if self._header_timer is not None:
            self._header_timer.cancel()
        if self._served is not None:  # uvicorn ends the newest request only
            self._served.disconnected = True
            self._served.message_event.set()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch_headers()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._head_bytes = 0
        self._begun += 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Hand a request over."""
        self._head_bytes, self._overhead = -1, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take bytes of a body."""
        self._overhead = 0
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        self._overhead += len(data)
        self._read = data
        self._begun = int(self.cycle is not None and self.cycle.more_body)
        super().data_received(data)
        if self._head_bytes >= 0:  # of the second message nobody knows where in the bytes it begins
            self._head_bytes += len(data) if self._begun < 2 else 1
        # The parser holds an unfinished head or trailer, however long. The middleware bounds a finished head.
        unfinished = self._overhead if self._head_bytes < 0 else self._head_bytes
        if unfinished > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"headers: longer than {MAX_HEADER_BYTES} bytes"))
        self._watch_headers()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        self._refuse(ApiError(400, msg))

    def timeout_keep_alive_handler(self) -> None:
        """Close an unused connection."""
        self.timeout_keep_alive_task = self.loop.call_later(READ_FIRST, super().timeout_keep_alive_handler)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """Read on as if no other protocol had been asked for, as Java's client asks for HTTP/2.

        The parser ends such a message with its head, and would take the body for the next one. Another parser reads the
        body, and the connection ends with the answer.
        """
        end = cast(httptools.HttpParserUpgrade, sys.exception()).args[0]
        lines = [b": ".join(field) for field in self.headers if field[0] in (b"content-length", b"transfer-encoding")]
        self.cycle.keep_alive, self.cycle.more_body = False, True
        self.cycle.message_event.clear()
        body = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
        self.parser = httptools.HttpRequestParser(body)
        self.parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *lines, b"", b""]))
        try:
            self.parser.feed_data(self._read[end:])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _watch_headers(self) -> None:
        """Run the timer while a head is due and no answer is."""
        due = self.cycle is None or self.cycle.response_complete
        if self.timeout_keep_alive_task is not None:
            due &= self._head_bytes >= 0
        if due and self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout, self._read_first)
        elif not due and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _read_first(self) -> None:
        self._header_timer = self.loop.call_later(READ_FIRST, self._give_up)

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


LAST_ANSWERS = 2.0
"""Seconds for the last bytes of answers to be sent, once nothing runs any more."""


def bind(settings: ServerSettings) -> socket.socket:
    """A socket at the server's address. Connections are refused until `run`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; connections inherit it
        # A closed connection, too, would stay with what is buffered for it until its client reads that.
        milliseconds = int(min(1000 * settings.slow_client_timeout, 1 << 30))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, milliseconds))
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

    SIGTERM and SIGINT let running requests finish for `settings.shutdown_timeout` seconds; a second one aborts them.

    `listener`: what `bind` gave; closed at the end. `on_start`: function that is called with the base URL once
    connections are accepted.

    Exit status: 0, or 1 if the engine has failed.
    """
    process = _Process(server, on_start and (lambda: on_start(_url(server.settings, listener))))
    # The models' objects live as long as the process. A collection that walks them takes longer than an engine step.
    gc.collect()
    gc.freeze()
    try:
        with new_runner() as runner:
            runner.run(process.serve(sockets=[listener]))
    finally:
        gc.unfreeze()
        listener.close()
    return process.status


def new_runner() -> asyncio.Runner:
    """Runner of a server's event loop: uvloop's, where that exists."""
    return asyncio.Runner(loop_factory=uvloop and uvloop.new_event_loop)


class _Process(uvicorn.Server):
    """uvicorn's server, which keeps answering while running requests finish."""

    def __init__(self, server: Server, on_start: Callable[[], None] | None):
        super().__init__(
            uvicorn.Config(
                create_app(server),
                # uvicorn calls what it is given, though it declares a class.
                http=cast(Any, partial(HttpProtocol, header_timeout=server.settings.slow_client_timeout)),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=round(LAST_ANSWERS),
            )
        )
        self.status = 0
        self._server = server
        self._on_start = on_start
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, at the first signal; abort what runs, at a second; leave everything, at a third."""
        now = time.monotonic()
        if not self._server.draining:
            self._server.draining = True
            self._deadline = now + self._server.settings.shutdown_timeout
        elif self._deadline is None or self._deadline > now:
            self._deadline = now
        else:
            self.should_exit = self.force_exit = True

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
