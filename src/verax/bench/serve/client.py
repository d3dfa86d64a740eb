"""Client of a server that speaks OpenAI's API, on httpx, and servers that a benchmark starts itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verax._optional import require_optional
from verax.bench.serve.load import Answer, Request
from verax.errors import InvalidParameterError, VeraxError

__all__ = ["Client", "started"]

httpx: Any = require_optional("httpx")

SLOW_PAUSE, SLOW_BUFFER = 0.1, 4096
"""Seconds that a slow reader waits after each read, and its receive buffer in bytes: small, so that the server's side
fills."""

TIMEOUT, START, STOP = 600.0, 900.0, 30.0
"""Seconds after which a request is given up (openai-python's default), until a server has to be healthy (the first
start of a large model compiles for minutes), and that it has to end after SIGTERM."""

LOG_LINES = 12
"""Last lines of a failed server's output that its error repeats."""


class Client:
    """Connections to one server; each request has a connection of its own, as of a client of its own.

    Raises:
        InvalidParameterError: if the base URL is not an http URL with a host.
    """

    def __init__(self, url: str, *, api_key: str | None = None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidParameterError(f"url: expected one such as http://127.0.0.1:8000/v1, got {url!r}")
        self.url = url.rstrip("/")
        self.model: str | None = None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)]
        transports = {
            slow: httpx.AsyncHTTPTransport(limits=limits, socket_options=small if slow else None)
            for slow in (False, True)
        }
        self._clients = {
            slow: httpx.AsyncClient(headers=headers, timeout=TIMEOUT, transport=transport)
            for slow, transport in transports.items()
        }

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    async def fetch(self, path: str) -> str:
        """Text of a GET of a path from the server's root.

        Raises:
            VeraxError: if the server does not answer, or with another status than 200.
        """
        url = httpx.URL(self.url).join(path)
        try:
            response = await self._clients[False].get(url, timeout=10.0)
        except httpx.HTTPError as error:
            raise VeraxError(f"{url}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise VeraxError(f"{url}: status {response.status_code}: {response.text[:200]}")
        return response.text

    async def find_model(self) -> None:
        """Take the first model that the server lists as the model of all requests.

        Raises:
            VeraxError: if it does not answer, or lists none.
        """
        try:
            self.model = json.loads(await self.fetch(f"{urlsplit(self.url).path}/models"))["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise VeraxError(f"url: {self.url}/models lists no model") from error

    async def complete(self, request: Request) -> Answer:
        """Answer of a streamed, greedy completion of a fixed number of tokens. A failure is a part of the answer."""
        answer = Answer(request, time.perf_counter())
        body = {
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,  # the whole answer is compared
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"model": self.model} if self.model else {}),
        }
        post = self._clients[request.slow].stream("POST", f"{self.url}/completions", json=body)
        try:
            async with asyncio.timeout(TIMEOUT), post as response:
                if response.status_code != 200:
                    answer.error = f"http {response.status_code}"
                else:
                    await _read(response, answer)
        except (TimeoutError, httpx.TimeoutException):
            answer.error = "timeout"
        except httpx.RemoteProtocolError:
            answer.error = answer.error or "lost: no end of the stream"
        except httpx.TransportError as error:
            answer.error = f"connection: {type(error).__name__}"
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # not the events of OpenAI's API
            answer.error = f"protocol: {type(error).__name__}"
        answer.ended = time.perf_counter()
        return answer


async def _read(response: Any, answer: Answer) -> None:
    """Fill an answer from the server-sent events of a response, until its end or until the client leaves."""
    # By bytes: httpx's lines end at U+2028 and the like too, which tokens may have.
    request, pieces, rest, finish_reason = answer.request, [], b"", None
    if request.leave_after == 0:
        answer.left = True
        return
    async for data in response.aiter_bytes():
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if line[5:].strip() == b"[DONE]":
                answer.text = "".join(pieces)
                if finish_reason is None:
                    answer.error = "lost: no finish_reason"
                elif answer.completion_tokens != request.max_tokens:
                    answer.error = f"lost: {answer.completion_tokens} tokens instead of {request.max_tokens}"
                return
            event = json.loads(line[5:])
            if (failure := event.get("error")) is not None:
                answer.error = f"in the stream: {failure.get('type') if isinstance(failure, dict) else failure}"
                return
            answer.id = answer.id or event.get("id")
            if event.get("id") != answer.id:
                answer.error = "mixed: an event has another id"
                return
            if usage := event.get("usage"):
                answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            for choice in event.get("choices", ()):
                answer.events.append(now)
                pieces.append(choice.get("text", ""))
                finish_reason = choice.get("finish_reason") or finish_reason
            if request.leave_after is not None and len(answer.events) >= request.leave_after:
                answer.left = True
                return
        if request.slow:
            await asyncio.sleep(SLOW_PAUSE)
    answer.error = "lost: no end of the stream"


@contextlib.asynccontextmanager
async def started(command: Callable[[int], Sequence[str]]) -> AsyncIterator[str]:
    """Root URL of a server on a free port of this machine that runs while the block does.

    Args:
        command: its command line, given a port. `/health` answers 200 once it is ready.

    Raises:
        VeraxError: if it ends by itself or is not ready in time; the message has the end of its output.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words, client, begin = list(command(port)), Client(f"http://127.0.0.1:{port}"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while not await _is_healthy(client):
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
                printed = " | ".join(lines) or "it printed nothing"
                if process.poll() is not None:
                    raise VeraxError(f"{words[0]}: ended with status {process.returncode}: {printed}")
                if time.monotonic() - begin > START:
                    raise VeraxError(f"{words[0]}: not ready after {START:.0f} s: {printed}")
                await asyncio.sleep(0.2)
            yield client.url
        finally:
            await client.close()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


async def _is_healthy(client: Client) -> bool:
    try:
        await client.fetch("/health")
    except VeraxError:
        return False
    return True
