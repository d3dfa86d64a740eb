"""A client of `/v1/completions` that takes little of the processor: server-sent events by hand.

The client shares its cores with the server that it measures. An `asyncio.Protocol` took 22 us of the processor for an
event, asyncio's streams 28 us, httpx 77 us (two cores, 32 streams of 128 events).
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from verax.bench.serve.http import Body, Target
from verax.bench.serve.traffic import Request

__all__ = ["Answer", "ask"]

SLOW_PAUSE = 0.1
"""Seconds that a slow reader waits after each read."""

SLOW_BUFFER = 4096
"""Receive buffer of a slow reader, in bytes: small, so that the server's side fills."""

TIMEOUT = 600.0
"""Seconds after which a request is given up: openai-python's default."""


@dataclass(slots=True)
class Answer:
    """Record of one request: times in seconds of `time.perf_counter`, tokens as the server counted them."""

    request: Request
    sent: float
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    """Time of each event with a piece of the answer."""
    text: str = ""
    id: str | None = None
    """Id of the completion."""
    request_id: str = ""
    """Id of the request, which the client chose and the server's log repeats."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    left: bool = False
    """True if the client disconnected on purpose."""
    error: str | None = None
    """Kind of failure, such as `http 429`; None if there was none."""

    @property
    def completed(self) -> bool:
        """True for a whole answer, as it was asked for."""
        return self.error is None and not self.left


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Stream(asyncio.Protocol):
    """Connection of one streamed completion; fills an `Answer` and calls `done` at its end."""

    def __init__(self, answer: Answer, message: bytes, done: Callable[[], None]):
        self._answer, self._message, self._done = answer, message, done
        self._body = Body()
        self._rest = b""
        self._pieces: list[str] = []
        self._finish_reason: str | None = None
        self._complete = False
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._message)
        if self._answer.request.leave_after == 0:
            self._leave()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._answer.left:
            return
        try:
            self._rest += self._body.feed(data)
            if self._body.status == 200:
                *lines, self._rest = self._rest.split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        self._event(line[5:].strip(), now)
        except (ValueError, msgspec.MsgspecError) as error:
            self._fail(f"protocol: {type(error).__name__}")
        if self._answer.request.slow and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(SLOW_PAUSE, self._resume)

    def _resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _event(self, data: bytes, now: float) -> None:
        answer = self._answer
        if answer.left:
            return
        if data == b"[DONE]":
            self._complete = True
            return
        event = _decode(data)
        if event.error is not None:
            self._fail(f"in the stream: {_error_type(event.error)}")
        if answer.id is None:
            answer.id = event.id
        elif event.id != answer.id:
            self._fail("mixed: an event has another id")
        if event.usage is not None:
            answer.prompt_tokens, answer.completion_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        for choice in event.choices:
            answer.events.append(now)
            self._pieces.append(choice.text)
            self._finish_reason = choice.finish_reason or self._finish_reason
        if answer.request.leave_after is not None and len(answer.events) >= answer.request.leave_after:
            self._leave()

    def _leave(self) -> None:
        self._answer.left = True
        self._transport.close()

    def _fail(self, error: str) -> None:
        self._answer.error = self._answer.error or error
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        answer = self._answer
        answer.ended = time.perf_counter()
        answer.text = "".join(self._pieces)
        if answer.error is None and not answer.left:
            answer.error = self._what_is_missing(exc)
        self._done()

    def _what_is_missing(self, exc: Exception | None) -> str | None:
        """Kind of failure of a stream that ended by itself; None if it was whole."""
        answer = self._answer
        if self._body.status not in (0, 200):
            return f"http {self._body.status}"
        if exc is not None:
            return f"connection: {type(exc).__name__}"
        if not self._complete:
            return "lost: no end of the stream"
        if self._finish_reason is None:
            return "lost: no finish_reason"
        if answer.completion_tokens != answer.request.max_tokens:
            return f"lost: {answer.completion_tokens} tokens instead of {answer.request.max_tokens}"
        return None


def _error_type(error: Any) -> str:
    return str(error.get("type") if isinstance(error, dict) else error)


async def ask(target: Target, request: Request) -> Answer:
    """Send a request and read its answer. A failure is a part of the answer, not an exception."""
    loop = asyncio.get_running_loop()
    finished = loop.create_future()
    answer = Answer(request, time.perf_counter(), request_id=uuid.uuid4().hex)
    message = target.completion(request, answer.request_id)
    done = lambda: None if finished.done() else finished.set_result(None)
    transport = None
    try:
        async with asyncio.timeout(TIMEOUT):
            transport, _ = await _connect(target, lambda: _Stream(answer, message, done), request)
            await finished
    except TimeoutError:
        answer.error = "timeout"
    except OSError as error:
        answer.error = f"connection: {type(error).__name__}"
    finally:
        if transport is not None:
            transport.abort()
    answer.ended = answer.ended or time.perf_counter()
    return answer


async def _connect(target: Target, make: Callable[[], asyncio.Protocol], request: Request) -> Any:
    loop = asyncio.get_running_loop()
    if not request.slow:
        return await loop.create_connection(make, target.host, target.port)
    family, kind, number, _, address = (await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))[0]
    connection = socket.socket(family, kind, number)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        connection.setblocking(False)
        await loop.sock_connect(connection, address)
        return await loop.create_connection(make, sock=connection)
    except BaseException:
        connection.close()
        raise
