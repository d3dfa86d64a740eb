"""Load: requests drawn from a seed, their times of arrival, closed and open loops of them, and latencies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verax.errors import InvalidParameterError

__all__ = [
    "LATENCIES",
    "Answer",
    "Ask",
    "Load",
    "Request",
    "Run",
    "Traffic",
    "arrival_times",
    "goodput_limits",
    "latencies",
    "run_load",
    "summarise",
]

FIRST_TOKEN = 3
"""Smallest id in a prompt: the ids below are end, padding and the like in most vocabularies."""

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""vLLM's names: time to first token, time per output token after the first one, time between two events of a stream,
and time of the whole request (end to end)."""

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and the behaviour of its client."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    slow: bool = False
    """True for a client that reads its answer slowly."""
    leave_after: int | None = None
    """Events of the answer after which the client disconnects; None for one that stays."""


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


@dataclass(frozen=True)
class Traffic:
    """Distribution of the requests of a load test. Lengths follow vLLM's random data set.

    Raises:
        InvalidParameterError: for a value out of range; the message begins with the field's name.
    """

    vocab_size: int
    input_tokens: int = 32
    """Tokens of a prompt after its shared prefix; the mean, if `range_ratio` is not 0."""
    output_tokens: int = 64
    """Tokens of an answer; the mean, if `range_ratio` is not 0."""
    range_ratio: float = 0.0
    """Lengths are uniform from `(1 - range_ratio)` to `(1 + range_ratio)` of their mean."""
    prefix_tokens: int = 0
    """Tokens of a prefix that many prompts share."""
    num_prefixes: int = 1
    """Number of different prefixes; each prompt has one of them at random."""
    slow_readers: float = 0.0
    """Share of clients that read slowly."""
    disconnect: float = 0.0
    """Share of clients that disconnect before the end of their answer, at a random one of its first events."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid, expected in (
            *((name, getattr(self, name) >= 1, "at least 1") for name in ("input_tokens", "output_tokens")),
            ("num_prefixes", self.num_prefixes >= 1, "at least 1"),
            ("vocab_size", self.vocab_size > FIRST_TOKEN, f"more than {FIRST_TOKEN}"),
            ("prefix_tokens", self.prefix_tokens >= 0, "at least 0"),
            ("range_ratio", 0 <= self.range_ratio < 1, "from 0 to less than 1"),
            *((name, 0 <= getattr(self, name) <= 1, "a share from 0 to 1") for name in ("slow_readers", "disconnect")),
        ):
            if not valid:
                raise InvalidParameterError(f"{name}: expected {expected}, got {getattr(self, name)}")

    @property
    def longest(self) -> int:
        """Length of the longest prompt with its answer, in tokens."""
        return self.prefix_tokens + sum(self._bounds(mean)[1] for mean in (self.input_tokens, self.output_tokens))

    def requests(self, run: int = 0) -> Iterator[Request]:
        """Endless requests of one run: another run has other prompts after the same prefixes.

        Answers that a server kept of one run are then of no use in the next one.
        """
        prefixes = np.random.default_rng([self.seed, 0]).integers(
            FIRST_TOKEN, self.vocab_size, (self.num_prefixes, self.prefix_tokens)
        )
        rng = np.random.default_rng([self.seed, 1, run])
        for number in itertools.count():
            own = rng.integers(FIRST_TOKEN, self.vocab_size, self._length(rng, self.input_tokens))
            prefix = prefixes[rng.integers(self.num_prefixes)]
            max_tokens = self._length(rng, self.output_tokens)
            slow, leaves = rng.random() < self.slow_readers, rng.random() < self.disconnect
            # An event can carry several tokens: who waited for a late event might read the whole answer.
            leave_after = int(rng.integers(max(1, max_tokens // 4)))
            prompt = (*prefix.tolist(), *own.tolist())
            yield Request(number, prompt, max_tokens, slow, leave_after if leaves else None)

    def _bounds(self, mean: int) -> tuple[int, int]:
        return max(1, round(mean * (1 - self.range_ratio))), round(mean * (1 + self.range_ratio))

    def _length(self, rng: np.random.Generator, mean: int) -> int:
        low, high = self._bounds(mean)
        return int(rng.integers(low, high + 1))


def arrival_times(rate: float, *, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Endless seconds from the start at which requests arrive: vLLM's gamma process, Poisson at burstiness 1.

    Args:
        rate: requests per second.
        burstiness: shape of the gamma distribution of the intervals; less than 1 is burstier, more is more even.
        seed: of the intervals.

    Raises:
        InvalidParameterError: if rate or burstiness is not positive.
    """
    for name, value in (("request_rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise InvalidParameterError(f"{name}: expected more than 0, got {value}")
    rng = np.random.default_rng([seed, 2])
    return itertools.accumulate(float(rng.gamma(burstiness, 1 / (rate * burstiness))) for _ in itertools.count())


Ask = Callable[[Request], Awaitable[Answer]]
"""Function that sends one request and returns its answer."""


@dataclass(frozen=True)
class Load:
    """Requests in flight at once, or their times of arrival; and their number, or the duration.

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


async def run_load(ask: Ask, load: Load, requests: Iterator[Request], *, number: int = 0) -> Run:
    """Send requests until their number or the time is reached, and wait for all answers.

    Args:
        ask: sends a request.
        load: the loop.
        requests: taken one by one.
        number: of the run, which decides on the times of arrival.
    """
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


def goodput_limits(text: str) -> dict[str, float]:
    """Milliseconds that a good request takes at most, by latency, of a text such as `ttft:200,tpot:50,e2el:5000`.

    Raises:
        InvalidParameterError: for an unknown latency or a limit that is not a positive number.
    """
    limits = {}
    for pair in text.split(","):
        name, _, limit = pair.strip().partition(":")
        name = "e2el" if name == "e2e" else name
        if name not in LATENCIES or name == "itl":
            raise InvalidParameterError(f"goodput: expected ttft, tpot or e2el with milliseconds, got {pair!r}")
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = 0.0
        if not 0 < limits[name] < float("inf"):
            raise InvalidParameterError(f"goodput: expected milliseconds such as {name}:200, got {pair!r}")
    return limits


def latencies(answer: Answer) -> dict[str, Any]:
    """Latencies of an answer in milliseconds; `itl` is a list. Latencies that an answer does not have are missing.

    An event can carry several tokens, so `tpot` divides by the tokens that the server counted.
    """
    found: dict[str, Any] = {"e2el": 1e3 * (answer.ended - answer.sent)}
    if answer.events:
        first, last = answer.events[0], answer.events[-1]
        found["ttft"] = 1e3 * (first - answer.sent)
        found["itl"] = (1e3 * np.diff(answer.events)).tolist()
        if answer.completion_tokens > 1:
            found["tpot"] = 1e3 * (last - first) / (answer.completion_tokens - 1)
    return found


def summarise(runs: Sequence[Run], goodput: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Numbers of the runs of one side.

    Latencies count complete answers whose clients read at once: a slow reader measures itself. Rates count the
    complete answers of all runs.

    Args:
        runs: with the same load.
        goodput: `goodput_limits`; a request is good if it keeps all of them.
    """
    answers = [answer for run in runs for answer in run.answers]
    seconds = sum(run.seconds for run in runs)
    completed = [answer for answer in answers if answer.completed]
    measured = [latencies(answer) for answer in completed if not answer.request.slow]
    numbers: dict[str, Any] = {
        "requests": len(answers),
        "completed": len(completed),
        "disconnected": sum(answer.left for answer in answers),
        "errors": dict(Counter(answer.error for answer in answers if answer.error is not None)),
        "output_tokens": sum(answer.completion_tokens for answer in completed),
        "requests_per_s": len(completed) / seconds,
        "output_tokens_per_s": sum(answer.completion_tokens for answer in completed) / seconds,
        "latency_ms": {name: percentiles([found[name] for found in measured if name in found]) for name in LATENCIES},
    }
    if goodput:
        good = sum(all(found.get(name, 0.0) <= limit for name, limit in goodput.items()) for found in measured)
        numbers["goodput_requests_per_s"] = good / seconds
    return numbers


def percentiles(values: list[Any]) -> dict[str, float] | None:
    """Mean and percentiles, or None of nothing; lists among the values count with each of their numbers."""
    numbers = np.concatenate([np.atleast_1d(value) for value in values]) if values else np.empty(0)
    if not len(numbers):
        return None
    return {"mean": float(np.mean(numbers))} | {f"p{q}": float(np.percentile(numbers, q)) for q in PERCENTILES}
