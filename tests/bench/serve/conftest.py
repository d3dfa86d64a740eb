"""Answers with known times, and a server of completions without a model, whose faults are planted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from verax.bench.serve.load import Answer, Client, Request


def answer(number, first, gap, tokens, **changes):
    """An answer whose first token takes `first` seconds, and each further one `gap`."""
    record = Answer(Request(number, (5,), tokens, slow=changes.pop("slow", False)), sent=10.0)
    record.events = [10.0 + first + gap * n for n in range(tokens)]
    record.ended = record.events[-1] + 0.5
    record.completion_tokens = tokens
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def answer_of(prompt: list[int], max_tokens: int) -> list[str]:
    """Pieces of the answer to a prompt."""
    return [f" {sum(prompt)}.{number}" for number in range(max_tokens)]


@dataclass
class FakeServer:
    """Server whose faults are chosen by the number of the request; `async with server.serving() as client`."""

    faults: dict[int, str] = field(default_factory=dict)
    """Fault by number of the request: `429`, `cut`, `short`, `error`, `other id`, `garbage`."""
    cut_at: int = 0
    """Bytes of each write, to cut chunks and events anywhere; 0 for whole ones."""
    pause: float = 0.0
    """Seconds between two tokens."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Client]:
        """Serve while the block runs."""
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        try:
            client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
            client.model = "fake"
            yield client
            await client.close()
        finally:
            server.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            line = head.partition("\r\n")[0]
            if "POST" in line and "/completions" in line:
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                await self._complete(json.loads(await reader.readexactly(length)), writer)
            else:
                pages = {"/metrics": "num_requests_running 0.0", "/v1/models": '{"data": [{"id": "fake"}]}'}
                page = pages.get(line.split()[1])
                status = "404 Not Found" if page is None else "200 OK"
                body = (page or "").encode()
                writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        fault = self.faults.get(number)
        if fault == "429":
            text = b'{"error": {"message": "queue: full", "type": "rate_limit_error"}}'
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n")
        for event in self._events(number, body, fault):
            await self._chunk(writer, event)
            await asyncio.sleep(self.pause)
        if fault != "cut":
            await self._chunk(writer, b"")

    def _events(self, number: int, body: dict[str, Any], fault: str | None) -> list[bytes]:
        count = body["max_tokens"]
        events: list[Any] = [
            {"id": f"cmpl-{number}", "choices": [{"index": 0, "text": piece, "finish_reason": None}], "usage": None}
            for piece in answer_of(body["prompt"], count)
        ]
        events[-1]["choices"][0]["finish_reason"] = "length"
        if fault == "cut":
            events = events[:2]
        if fault == "other id":
            events[1]["id"] = "cmpl-other"
        if fault == "error":
            events[1:] = [{"error": {"type": "server_error", "message": "it broke"}}]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count - (fault == "short")}
        events.append({"id": f"cmpl-{number}", "choices": [], "usage": usage})
        whole = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
        if fault == "garbage":
            whole[1] = b"data: {]\n\n"
        if fault == "cut":
            return whole[:-1]
        return [b": ping\n\n", *whole, b"data: [DONE]\n\n"]

    async def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if writer.transport.is_closing():
            raise ConnectionResetError
        framed = b"%x\r\n%b\r\n" % (len(data), data)
        step = self.cut_at or len(framed)
        for begin in range(0, len(framed), step):
            writer.write(framed[begin : begin + step])
            await writer.drain()
            if self.cut_at:
                await asyncio.sleep(0)


@contextlib.contextmanager
def in_a_thread(server):
    """Base URL of a fake server that runs in another thread."""
    ready, over, started = threading.Event(), asyncio.Event(), []

    async def main():
        async with server.serving() as client:
            started.extend([asyncio.get_running_loop(), client.url])
            ready.set()
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    ready.wait()
    try:
        yield started[1]
    finally:
        started[0].call_soon_threadsafe(over.set)
        thread.join()
