"""Load: requests drawn from a seed, their times of arrival, closed and open loops of them, and latencies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from verax.bench.settings import ServeSettings, TrafficSettings

__all__ = ["Answer", "Ask", "Load", "Request", "Run", "draw_requests", "make_loads", "run_load", "summarise"]

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
    """Record of one request: times in seconds of `time.perf_counter`, tokens as the server counted them.

    Attributes:
        events: time of each event with a piece of the answer.
        id: of the completion.
        left: True if the client disconnected on purpose.
        error: kind of failure, such as `http 429`; None if there was none.
    """

    request: Request
    sent: float
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    text: str = ""
    id: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    left: bool = False
    error: str | None = None

    @property
    def completed(self) -> bool:
        """True for a whole answer, as it was asked for."""
        return self.error is None and not self.left


Ask = Callable[[Request], Awaitable[Answer]]
"""Function that sends one request and returns its answer."""


def draw_requests(traffic: TrafficSettings, run: int = 0) -> Iterator[Request]:
    """Endless requests of one run: another run has other prompts after the same prefixes.

    Answers that a server kept of one run are then of no use in the next one.
    """
    sizes, vocab_size = (traffic.num_prefixes, traffic.prefix_tokens), traffic.vocab_size
    prefixes = np.random.default_rng([0, 0]).integers(FIRST_TOKEN, vocab_size, sizes)
    rng = np.random.default_rng([0, 1, run])
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
