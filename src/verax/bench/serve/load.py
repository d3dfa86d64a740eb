"""Closed and open loops of requests against a server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from verax.bench.serve.client import Answer
from verax.bench.serve.traffic import Request
from verax.errors import InvalidParameterError

__all__ = ["Ask", "Load", "Run", "run_load"]

Ask = Callable[[Request], Awaitable[Answer]]
"""Sends one request and returns its answer."""


@dataclass(frozen=True)
class Load:
    """Requests in flight at once, or their times of arrival; and how many, or for how long.

    Raises:
        InvalidParameterError: if it has no end.
    """

    name: str
    concurrency: int | None = None
    """Requests in flight at once: a closed loop. None for an open one."""
    arrivals: Callable[[int], Iterator[float]] | None = None
    """Times of arrival of a run by its number, in seconds from its start: an open loop."""
    num_requests: int | None = None
    duration: float | None = None
    """Seconds after which no more requests are sent; those in flight are waited for."""

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.arrivals is None):
            raise InvalidParameterError("concurrency: expected either a concurrency or a request rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidParameterError(f"concurrency: expected at least 1, got {self.concurrency}")
        if self.duration is not None and not 0 < self.duration < float("inf"):
            raise InvalidParameterError(f"duration: expected more than 0 seconds, got {self.duration}")
        if self.num_requests is None and self.duration is None:
            raise InvalidParameterError("num_requests: expected a number of requests or a duration")


@dataclass(frozen=True)
class Run:
    """Answers of one run, in the order of their requests, and its seconds from the first request to the last answer."""

    answers: tuple[Answer, ...]
    seconds: float


async def run_load(
    ask: Ask,
    load: Load,
    requests: Iterator[Request],
    *,
    number: int = 0,
    on_answer: Callable[[], None] | None = None,
) -> Run:
    """Send requests until their number or the time is reached, and wait for all answers.

    Args:
        ask: sends a request.
        load: the loop.
        requests: taken one by one.
        number: of the run, which decides on the times of arrival.
        on_answer: function that is called after each answer.
    """
    send = ask if on_answer is None else partial(_counted, ask, on_answer)
    begin = time.perf_counter()
    deadline = None if load.duration is None else begin + load.duration
    requests = itertools.islice(requests, load.num_requests)
    if load.arrivals is not None:
        answers = await _open_loop(send, requests, load.arrivals(number), begin, deadline)
    else:
        assert load.concurrency is not None
        answers = await _closed_loop(send, requests, load.concurrency, deadline)
    answers.sort(key=lambda answer: answer.request.number)
    return Run(tuple(answers), time.perf_counter() - begin)


async def _closed_loop(ask: Ask, requests: Iterator[Request], concurrency: int, deadline: float | None) -> list[Answer]:
    answers = []

    async def client() -> None:
        for request in requests:
            answers.append(await ask(request))
            if deadline is not None and time.perf_counter() >= deadline:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return answers


async def _open_loop(
    ask: Ask, requests: Iterator[Request], arrivals: Iterator[float], begin: float, deadline: float | None
) -> list[Answer]:
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request, arrival in zip(requests, arrivals, strict=False):
            if deadline is not None and begin + arrival >= deadline:
                break
            await asyncio.sleep(begin + arrival - time.perf_counter())
            tasks.append(group.create_task(_asked(ask, request)))
    return [task.result() for task in tasks]


async def _asked(ask: Ask, request: Request) -> Answer:
    return await ask(request)


async def _counted(ask: Ask, on_answer: Callable[[], None], request: Request) -> Answer:
    answer = await ask(request)
    on_answer()
    return answer
