"""Load generator: requests drawn from a seed, closed and open loops of them, a client of OpenAI's API, latencies, and
servers that a benchmark starts itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from verax._optional import require_optional
from verax.bench.processes import CACHES
from verax.bench.settings import ServeSettings, TrafficSettings
from verax.bench.worker import peak_bytes
from verax.errors import InvalidParameterError, VeraxError

httpx: Any = require_optional("httpx")

SLOW_PAUSE, SLOW_BUFFER = 0.1, 4096
"""Seconds that a slow reader waits after each read, and its receive buffer in bytes: small, so that the server's side
fills."""

TIMEOUT, START, STOP = 600.0, 900.0, 30.0
"""Seconds after which a request is given up (openai-python's default), until a server has to be healthy (the first
start of a large model compiles for minutes), and that it has to end after SIGTERM."""

LOG_LINES = 12
"""Last lines of a failed server's output that its error repeats."""

FIRST_TOKEN = 3
"""Smallest id in a prompt: the ids below are end, padding and the like in most vocabularies."""

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""vLLM's names: time to first token, time per output token after the first one, time between two events of a stream,
and time of the whole request (end to end)."""

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and the behaviour of its client.

    Attributes:
        slow: True for a client that reads its answer slowly.
        leave_after: events of the answer after which the client disconnects; None for one that stays.
    """

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    slow: bool = False
    leave_after: int | None = None


@dataclass(slots=True)
class Answer:
    """Record of one request: times in seconds of `time.perf_counter`, tokens of the answer as the server counted them.

    Attributes:
        events: time of each event with a piece of the answer.
        left: True if the client disconnected on purpose.
        error: kind of failure, such as `http 429`; None if there was none.
    """

    request: Request
    sent: float
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    text: str = ""
    completion_tokens: int = 0
    left: bool = False
    error: str | None = None

    @property
    def completed(self) -> bool:
        """True for a whole answer, as it was asked for."""
        return self.error is None and not self.left


Ask = Callable[[Request], Awaitable[Answer]]
"""Function that sends one request and returns its answer."""


def draw_requests(traffic: TrafficSettings, run: int = 0, *, seed: int = 0) -> Iterator[Request]:
    """Endless requests of one run: another run has other prompts after the same prefixes.

    Answers that a server kept of one run are then of no use in the next one. With another seed, prefixes differ too.
    """
    sizes, vocab_size = (traffic.num_prefixes, traffic.prefix_tokens), traffic.vocab_size
    prefixes = np.random.default_rng([seed, 0]).integers(FIRST_TOKEN, vocab_size, sizes)
    rng = np.random.default_rng([seed, 1, run])
    for number in itertools.count():
        own = rng.integers(FIRST_TOKEN, vocab_size, traffic.input_tokens)
        prefix = prefixes[rng.integers(traffic.num_prefixes)]
        slow, leaves = rng.random() < traffic.slow_readers, rng.random() < traffic.disconnect
        # An event can carry several tokens: who waited for a late event might read the whole answer.
        leave_after = int(rng.integers(max(1, traffic.output_tokens // 4)))
        prompt = (*prefix.tolist(), *own.tolist())
        yield Request(number, prompt, traffic.output_tokens, slow, leave_after if leaves else None)


def arrival_times(rate: float, seed: int = 0) -> Iterator[float]:
    """Endless seconds from the start at which requests arrive, a Poisson process of `rate` requests per second."""
    rng = np.random.default_rng([seed, 2])
    return itertools.accumulate(float(rng.exponential(1 / rate)) for _ in itertools.count())


@dataclass(frozen=True)
class Load:
    """Requests in flight at once, or their times of arrival; and their number, or the duration.

    Attributes:
        concurrency: requests in flight at once: a closed loop. None for an open one.
        arrivals: times of arrival of a run by its number, in seconds from its start: an open loop.
        num_requests: requests of a run.
        duration: seconds after which no more requests are sent; those in flight are waited for.
    """

    name: str
    concurrency: int | None = None
    arrivals: Callable[[int], Iterator[float]] | None = None
    num_requests: int | None = None
    duration: float | None = None


FEWEST_REQUESTS, OPEN_LOOP_REQUESTS = 16, 100
"""Requests of a closed loop at least, and of an open one, unless a number is given. More streams send two each."""


def make_loads(settings: ServeSettings) -> list[Load]:
    """Loads that the settings ask for: one for each rate of an open loop, or for each number of streams."""
    count, duration, loads = settings.num_requests, settings.duration, []
    for rate in settings.request_rate:
        number = count or (None if duration else OPEN_LOOP_REQUESTS)
        loads.append(Load(f"{rate:g} requests per second", None, partial(arrival_times, rate), number, duration))
    for streams in settings.concurrency or (() if loads else (1, 8, 32, 64)):
        number = count or (None if duration else max(2 * streams, FEWEST_REQUESTS))
        loads.append(Load(f"{streams} stream{'s' if streams > 1 else ''}", streams, None, number, duration))
    return loads


@dataclass(frozen=True)
class Run:
    """Answers of one run, in the order of their requests, and its seconds from the first request to the last answer."""

    answers: tuple[Answer, ...]
    seconds: float


async def run_load(ask: Ask, load: Load, requests: Iterator[Request], *, number: int = 0) -> Run:
    """Send requests until their number or the time is reached, and wait for all answers."""
    answers: list[Answer] = []
    begin = time.perf_counter()
    deadline = float("inf") if load.duration is None else begin + load.duration
    requests = itertools.islice(requests, load.num_requests)

    async def send(request: Request) -> None:
        answers.append(await ask(request))

    async def client() -> None:
        for request in requests:
            await send(request)
            if time.perf_counter() >= deadline:
                return

    async with asyncio.TaskGroup() as group:
        if load.arrivals is None:
            for _ in range(load.concurrency or 1):
                group.create_task(client())
        else:
            for request, arrival in zip(requests, load.arrivals(number), strict=False):
                if begin + arrival >= deadline:
                    break
                await asyncio.sleep(begin + arrival - time.perf_counter())
                group.create_task(send(request))
    answers.sort(key=lambda answer: answer.request.number)
    return Run(tuple(answers), time.perf_counter() - begin)


def latencies(answer: Answer) -> dict[str, Any]:
    """Latencies of an answer in milliseconds; `itl` is a list. Latencies that an answer does not have are missing.

    An event can carry several tokens, so `tpot` divides by the tokens that the server counted.
    """
    times: dict[str, Any] = {"e2el": 1e3 * (answer.ended - answer.sent)}
    if answer.events:
        first, last = answer.events[0], answer.events[-1]
        times |= {"ttft": 1e3 * (first - answer.sent), "itl": (1e3 * np.diff(answer.events)).tolist()}
        if answer.completion_tokens > 1:
            times["tpot"] = 1e3 * (last - first) / (answer.completion_tokens - 1)
    return times


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Numbers of the runs of one side with the same load.

    Latencies count complete answers whose clients read at once: a slow reader measures itself. Rates count the
    complete answers of all runs.
    """
    answers = [answer for run in runs for answer in run.answers]
    seconds = sum(run.seconds for run in runs)
    completed = [answer for answer in answers if answer.completed]
    measured = [latencies(answer) for answer in completed if not answer.request.slow]
    tokens = sum(answer.completion_tokens for answer in completed)
    return {
        "requests": len(answers),
        "completed": len(completed),
        "disconnected": sum(answer.left for answer in answers),
        "errors": dict(Counter(answer.error for answer in answers if answer.error is not None)),
        "output_tokens": tokens,
        "requests_per_s": len(completed) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "latency_ms": {name: _percentiles([times[name] for times in measured if name in times]) for name in LATENCIES},
    }


def _percentiles(values: list[Any]) -> dict[str, float] | None:
    """Mean and percentiles, or None of nothing; lists among the values count with each of their numbers."""
    numbers = np.concatenate([np.atleast_1d(value) for value in values]) if values else np.empty(0)
    if not len(numbers):
        return None
    return {"mean": float(np.mean(numbers))} | {f"p{q}": float(np.percentile(numbers, q)) for q in PERCENTILES}


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
        self._clients: dict[bool, Any] = {}
        for slow, options in ((False, []), (True, [(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)])):
            transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=options)
            self._clients[slow] = httpx.AsyncClient(headers=headers, timeout=TIMEOUT, transport=transport)

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
    request, pieces, rest, finish_reason, identity = answer.request, [], b"", None, None
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
            identity = identity or event.get("id")
            if event.get("id") != identity:
                answer.error = "mixed: an event has another id"
                return
            if usage := event.get("usage"):
                answer.completion_tokens = usage["completion_tokens"]
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


@dataclass(frozen=True)
class Server:
    """A started server: its root URL, the seconds until it was ready, and the id of its process."""

    url: str
    start_s: float
    process: int

    def measured(self) -> dict[str, Any]:
        """`start_s`, and `peak_bytes` of its memory so far; None where the system does not keep it."""
        return {"start_s": self.start_s, "peak_bytes": peak_bytes(self.process) or None}


@contextlib.asynccontextmanager
async def started(command: Callable[[int], Sequence[str]], *, empty_caches: bool = False) -> AsyncIterator[Server]:
    """Server on a free port of this machine that runs while the block does.

    Args:
        command: its command line, given a port. `/health` answers 200 once it is ready.
        empty_caches: nothing is compiled before, as at a first start.

    Raises:
        VeraxError: if it ends by itself or is not ready in time; the message has the end of its output.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words, client, begin = list(command(port)), Client(f"http://127.0.0.1:{port}"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verax-bench-", ignore_cleanup_errors=True) as folder:
        log, environment = Path(folder) / "log", os.environ | dict.fromkeys(CACHES if empty_caches else (), folder)
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
        try:
            while True:
                with contextlib.suppress(VeraxError):
                    await client.fetch("/health")
                    break
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
                printed = " | ".join(lines) or "it printed nothing"
                if process.poll() is not None:
                    raise VeraxError(f"{words[0]}: ended with status {process.returncode}: {printed}")
                if time.monotonic() - begin > START:
                    raise VeraxError(f"{words[0]}: not ready after {START:.0f} s: {printed}")
                await asyncio.sleep(0.2)
            yield Server(client.url, time.monotonic() - begin, process.pid)
        finally:
            await client.close()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
