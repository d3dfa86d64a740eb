"""Server-sent events, requests whose client goes away, and streams that outlive their connection."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verax.errors import InvalidParameterError
from verax.serve.http.errors import api_error, error_body, is_anthropic

DONE = b"data: [DONE]\n\n"
"""Last event of OpenAI's streams."""

PING = b": ping\n\n"

HEADERS_AFTER = 2.0
"""Seconds after which a stream begins without an event. An error until then is an answer with its real status."""

READ_FIRST = 0.1
"""Seconds from the end of a client's time until the client is given up. An event loop that stood still, with the
machine, runs its timers before it reads what has come in meanwhile: the client may have been in time."""

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """Client that closed its connection before the answer was there."""


def data_event(value: Any) -> bytes:
    """An event with an object as JSON."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


def named_event(name: str, value: Any) -> bytes:
    """An event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


class EventStream(Response):
    """Answer of events as they come.

    The generator is closed when the client goes away, or leaves what was sent unread for too long. An error before the
    first event is raised, so that it becomes an answer with its status. A later one becomes an event.

    `events`: encoded events, the last one included. `ping_interval`: seconds of silence after which a comment is sent.
    `slow_client_timeout`: seconds for which the client may leave a full buffer unread.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, ping_interval: float = 15.0, slow_client_timeout: float = 30.0
    ):
        self._events = events
        self._ping_interval = ping_interval
        self._slow_client_timeout = slow_client_timeout
        self._last = time.monotonic()
        self._sending = False
        self._started = False
        self.status_code = 200
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.raw_headers[[name for name, _ in self.raw_headers].index(b"content-length")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, or the client is gone."""
        sending = asyncio.create_task(self._send_all(scope, send))
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

    async def _send_all(self, scope: Scope, send: Send) -> None:
        try:
            async for event in self._events:
                await self._send(send, event)
        except Exception as error:
            if not self._started:
                raise
            body = error_body(api_error(error), scope)
            await self._send(send, named_event("error", body) if is_anthropic(scope) else data_event(body))
        await self._send(send, b"", more=False)

    async def _watch(self, send: Send) -> None:
        """Send pings while events are missing; return if the client does not read."""
        unread = 0.0
        while True:
            silent = time.monotonic() - self._last
            limit = self._slow_client_timeout if self._sending else self._ping_interval
            limit = limit if self._started else HEADERS_AFTER
            if silent < limit:
                await asyncio.sleep(min(limit - silent, self._slow_client_timeout))
            elif not self._sending:
                await self._send(send, PING)
            elif unread != self._last:
                unread = self._last
                await asyncio.sleep(READ_FIRST)
            else:
                return

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


ID_PATTERN = "[A-Za-z0-9_-]{16,128}"
"""Regular expression of an id."""


@dataclass
class _Stream:
    """The last bytes of one answer, and the task that makes them."""

    kept: bytearray = field(default_factory=bytearray)
    start: int = 0
    """Offset of the first byte that is kept."""
    done: bool = False
    error: Exception | None = None
    readers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Event of the next change: set once, then replaced."""
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def end(self) -> int:
        """Number of bytes so far."""
        return self.start + len(self.kept)

    def notify(self) -> None:
        """Wake the readers."""
        self.changed.set()
        self.changed = asyncio.Event()

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Put a timer in the place of the one that runs."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer


class RunningStreams:
    """Streams that outlive their connection, so that a page can be reloaded meanwhile; for one event loop.

    A chat request with the header `X-Conversation-Id` is generated by a task of its own into a bounded buffer. The
    response reads from that buffer, and so does `GET /v1/stream?conv_id=ID&from=N`, N being a number of bytes, as in
    llama.cpp's server. `DELETE /v1/stream?conv_id=ID` stops the answer. The id is a secret of the client that made it:
    whoever has it may read and stop the answer.

    Args:
        max_streams: number of streams that are kept at once. Further ones live and die with their connection.
        max_bytes: number of bytes that are kept of each. A slower reader gets an error.
        abandoned_after: seconds without a reader after which an answer is aborted.
        kept_after: seconds for which an answer can be read after its end.
    """

    def __init__(
        self,
        *,
        max_streams: int = 64,
        max_bytes: int = 4 << 20,
        abandoned_after: float = 30.0,
        kept_after: float = 60.0,
    ):
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._abandoned_after = abandoned_after
        self._kept_after = kept_after
        self._streams: dict[str, _Stream] = {}

    def start(self, conv_id: str | None, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Generate in a task of its own, and follow it from the beginning. An earlier stream of this id is stopped.

        Without an id, or if `max_streams` are kept already, these are the frames themselves.

        `conv_id`: value of the header X-Conversation-Id. `frames`: the answer as it goes over the wire. It is closed if
        nobody reads it for `abandoned_after`.
        """
        if conv_id is None:
            return frames
        if not re.fullmatch(ID_PATTERN, conv_id):
            raise InvalidParameterError("X-Conversation-Id: use 16 to 128 letters, digits, '_' or '-'")
        self.stop(conv_id)
        if len(self._streams) >= self._max_streams:
            return frames
        stream = self._streams[conv_id] = _Stream()
        stream.task = asyncio.create_task(self._pump(conv_id, stream, frames))
        self._stop_after(self._abandoned_after, conv_id, stream)
        return self._read(conv_id, stream, 0)

    def follow(self, conv_id: str, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream from an offset on, until its end.

        Raises:
            KeyError: if the stream does not exist, or has been forgotten.
            InvalidParameterError: if the bytes at the offset are not kept, or are not there yet.
        """
        stream = self._streams[conv_id]
        if not stream.start <= offset <= stream.end:
            raise InvalidParameterError(f"from: {offset} is not within {stream.start} to {stream.end}")
        return self._read(conv_id, stream, offset)

    def stop(self, conv_id: str) -> bool:
        """Abort a stream and forget it. False if it does not exist."""
        stream = self._streams.pop(conv_id, None)
        if stream is None:
            return False
        stream.set_timer(None)
        if stream.task is not None:
            stream.task.cancel()
        stream.done = True
        stream.notify()
        return True

    async def close(self) -> None:
        """Abort all streams, and wait for their tasks."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for conv_id in list(self._streams):
            self.stop(conv_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, conv_id: str, stream: _Stream, frames: AsyncGenerator[bytes, None]) -> None:
        try:
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    stream.kept += frame
                    excess = max(0, len(stream.kept) - self._max_bytes)
                    del stream.kept[:excess]
                    stream.start += excess
                    stream.notify()
        except Exception as error:
            stream.error = error
        finally:
            stream.done = True
            stream.notify()
            self._stop_after(self._kept_after, conv_id, stream)

    async def _read(self, conv_id: str, stream: _Stream, offset: int) -> AsyncGenerator[bytes, None]:
        stream.readers += 1
        if not stream.done:
            stream.set_timer(None)
        try:
            while True:
                if offset < stream.start:
                    raise InvalidParameterError(f"stream: read too slowly, bytes before {stream.start} are gone")
                if offset < stream.end:
                    unread = bytes(memoryview(stream.kept)[offset - stream.start :])
                    offset = stream.end
                    yield unread
                elif stream.error is not None:
                    raise stream.error
                elif stream.done:
                    return
                else:
                    await stream.changed.wait()
        finally:
            stream.readers -= 1
            if not stream.readers and not stream.done:
                self._stop_after(self._abandoned_after, conv_id, stream)

    def _stop_after(self, seconds: float, conv_id: str, stream: _Stream) -> None:
        """Stop a stream later, unless another one has taken its id."""
        if self._streams.get(conv_id) is stream:
            stream.set_timer(asyncio.get_running_loop().call_later(seconds, self.stop, conv_id))
