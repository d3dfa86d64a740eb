"""Server-sent events, and requests whose client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verax.serve.http.errors import ApiError, api_error

__all__ = ["DONE", "ClientDisconnectedError", "EventStream", "data_event", "named_event", "unless_disconnected"]

DONE = b"data: [DONE]\n\n"
"""Last event of OpenAI's streams."""

PING = b": ping\n\n"
HEADERS_AFTER = 2.0
"""Seconds after which a stream begins without an event. An error until then is an answer with its real status."""

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """Client that closed its connection before the answer was there."""


def data_event(value: Any) -> bytes:
    """An event with an object as JSON."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


def named_event(name: str, value: Any) -> bytes:
    """An event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def _error_event(error: ApiError) -> bytes:
    return data_event(error.body())


class EventStream(Response):
    """Answer of events as they come.

    The generator is closed when the client goes away, or leaves what was sent unread for too long. An error before the
    first event is raised, so that it becomes an answer with its status. A later one becomes an event.

    Args:
        events: encoded events, the last one included.
        ping_interval: seconds of silence after which a comment is sent.
        slow_client_timeout: seconds for which the client may leave a full buffer unread.
        error_event: makes the event of an error.
        background: a task for after the answer.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        ping_interval: float = 15.0,
        slow_client_timeout: float = 30.0,
        error_event: Callable[[ApiError], bytes] = _error_event,
        background: BackgroundTask | None = None,
    ):
        self._events = events
        self._ping_interval = ping_interval
        self._slow_client_timeout = slow_client_timeout
        self._error_event = error_event
        self._last = time.monotonic()
        self._sending = False
        self._started = False
        self.status_code = 200
        self.background = background
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.raw_headers[[name for name, _ in self.raw_headers].index(b"content-length")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, or the client is gone."""
        sending = asyncio.create_task(self._send_all(send))
        helpers = [asyncio.create_task(_disconnected(receive)), asyncio.create_task(self._watch(send))]
        try:
            await asyncio.wait([sending, *helpers], return_when=asyncio.FIRST_COMPLETED)
            ended = sending.done()
        finally:
            for task in (sending, *helpers):
                task.cancel()
            await asyncio.gather(sending, *helpers, return_exceptions=True)
            await self._events.aclose()
        if ended:
            sending.result()
        elif not self._started:
            raise ClientDisconnectedError
        if self.background is not None:
            await self.background()

    async def _send_all(self, send: Send) -> None:
        try:
            async for event in self._events:
                await self._send(send, event)
        except Exception as error:
            if not self._started:
                raise
            await self._send(send, self._error_event(api_error(error)))
        await self._send(send, b"", more=False)

    async def _watch(self, send: Send) -> None:
        """Send pings while there are no events; return if the client does not read."""
        while True:
            silent = time.monotonic() - self._last
            limit = self._slow_client_timeout if self._sending else self._ping_interval
            limit = limit if self._started else HEADERS_AFTER
            if silent < limit:
                await asyncio.sleep(min(limit - silent, self._slow_client_timeout))
            elif self._sending:
                return
            else:
                await self._send(send, PING)

    async def _send(self, send: Send, event: bytes, *, more: bool = True) -> None:
        self._last, self._sending = time.monotonic(), True
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": event, "more_body": more})
        self._last, self._sending = time.monotonic(), False


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine, which is cancelled if the client goes away. The request's body must have been read.

    Raises:
        ClientDisconnectedError: if the client went away.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
