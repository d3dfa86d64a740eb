"""Events of a simulated fleet: arrivals, turns of the engines' loops, tokens that are sent, failures."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from verax.bench.serve.client import Answer
from verax.bench.serve.load import Load, Run
from verax.bench.serve.traffic import Request
from verax.bench.simulate.replica import Progress, Replica
from verax.errors import InvalidParameterError
from verax.text.engine.replicas import ReplicaRouter

__all__ = ["ROUTERS", "Failures", "simulate"]

ROUTERS = ("least-loaded", "prefix")
"""Choice of a request's replica: the one with the least work; or the one with the least work beside what it has read
of the prompt already, as in the engine."""


@dataclass(frozen=True)
class Failures:
    """Replicas that fail at random times, alone. Their requests go on at another replica, behind what they have.

    Attributes:
        mean_time: seconds between two failures of one replica, in the mean.
        restart: seconds until it serves again.
        seed: of the times.

    Raises:
        InvalidParameterError: for times that are not positive.
    """

    mean_time: float
    restart: float
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("mtbf", self.mean_time), ("restart", self.restart)):
            if not 0 < value < float("inf"):
                raise InvalidParameterError(f"{name}: expected more than 0 seconds, got {value}")


class _Kind(IntEnum):
    """Kinds of events, in the order in which they happen at one time."""

    RESTART = 0
    ARRIVAL = 1
    SUBMISSION = 2
    FAILURE = 3
    DELIVERY = 4
    TURN = 5


def simulate(
    replicas: Sequence[Replica],
    load: Load,
    requests: Iterator[Request],
    *,
    number: int = 0,
    router: str = "least-loaded",
    failures: Failures | None = None,
    on_answer: Callable[[], None] | None = None,
) -> tuple[Run, int]:
    """Serve requests until their number or the time is reached, and all answers are complete.

    Args:
        replicas: engines with nothing to do.
        load: times of arrival, or requests in flight.
        requests: taken one by one.
        number: of the run, which decides on the times of arrival.
        router: one of `ROUTERS`.
        failures: of the replicas; None for none.
        on_answer: function that is called after each answer.

    Returns:
        The answers with the simulated seconds, and the number of failures.
    """
    return _Fleet(replicas, load, requests, number, router, failures, on_answer).run()


class _Fleet:
    def __init__(
        self,
        replicas: Sequence[Replica],
        load: Load,
        requests: Iterator[Request],
        number: int,
        router: str,
        failures: Failures | None,
        on_answer: Callable[[], None] | None,
    ):
        if router not in ROUTERS:
            raise InvalidParameterError(f"router: expected {' or '.join(ROUTERS)}, got {router!r}")
        self._router = ReplicaRouter(replicas, block_size=replicas[0].block_size if router == "prefix" else None)
        self._load, self._failures, self._on_answer = load, failures, on_answer
        self._requests = itertools.islice(requests, load.num_requests)
        self._arrivals = None if load.arrivals is None else load.arrivals(number)
        self._events: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()
        self._turning: set[int] = set()
        """Replicas with a turn among the events, by identity: an idle one has none."""
        self._waiting: deque[Answer] = deque()
        """Requests that came while no replica served."""
        self._answers: list[Answer] = []
        self._unfinished = 0
        self._num_failures = 0
        if failures is not None:
            rng = np.random.default_rng([failures.seed, 3, number])
            self._lifetime = lambda: float(rng.exponential(failures.mean_time))
            for replica in replicas:
                self._push(self._lifetime(), _Kind.FAILURE, replica)

    def run(self) -> tuple[Run, int]:
        if self._arrivals is None:
            for _ in range(self._load.concurrency or 0):
                self._send_next(0.0)
        else:
            self._send_next(next(self._arrivals))
        now = 0.0
        # Failures go on for ever; the run ends with the last answer.
        while self._unfinished:
            now, kind, _, subject = heapq.heappop(self._events)
            if kind == _Kind.ARRIVAL:
                self._route(subject, now)
                if self._arrivals is not None:
                    self._send_next(next(self._arrivals))
            elif kind == _Kind.SUBMISSION:
                self._submit(now, *subject)
            elif kind == _Kind.TURN:
                self._turn(now, *subject)
            elif kind == _Kind.DELIVERY:
                self._deliver(now, *subject)
            elif kind == _Kind.FAILURE:
                self._fail(subject, now)
            else:
                self._restart(subject, now)
        return Run(tuple(self._answers), now), self._num_failures

    def _push(self, at: float, kind: _Kind, subject: Any) -> None:
        heapq.heappush(self._events, (at, kind, next(self._order), subject))

    def _send_next(self, at: float) -> None:
        """Let the next request arrive, if there is one and time is left."""
        if self._load.duration is not None and at >= self._load.duration:
            return
        if (request := next(self._requests, None)) is not None:
            self._unfinished += 1
            self._answers.append(Answer(request, at, prompt_tokens=len(request.prompt)))
            self._push(at, _Kind.ARRIVAL, self._answers[-1])

    def _route(self, answer: Answer, now: float) -> None:
        """Send a request to the host of a replica."""
        if not self._router.serving:
            self._waiting.append(answer)
            return
        replica = self._router.choose(answer.request.prompt)
        self._push(replica.receive(answer, now), _Kind.SUBMISSION, (replica, replica.epoch, answer))

    def _submit(self, now: float, replica: Replica, epoch: int, answer: Answer) -> None:
        """Queue a request that a host has read."""
        if epoch != replica.epoch:  # that engine failed since, and the request went on elsewhere
            return
        replica.submit(answer, now)
        if id(replica) not in self._turning:
            self._turning.add(id(replica))
            self._push(now, _Kind.TURN, (replica, epoch, []))

    def _turn(self, now: float, replica: Replica, epoch: int, read: list[Progress]) -> None:
        """Send what the turn before has read, and begin the next one."""
        if epoch != replica.epoch:  # that engine failed since
            return
        if read:
            self._push(replica.send(read, now), _Kind.DELIVERY, (replica, epoch, read))
        if replica.has_work:
            end, read = replica.step(now)
            self._push(end, _Kind.TURN, (replica, epoch, read))
        else:
            self._turning.discard(id(replica))

    def _deliver(self, now: float, replica: Replica, epoch: int, read: Sequence[Progress]) -> None:
        """Give clients the tokens that a host has sent; those of a closed loop send their next request."""
        if epoch != replica.epoch:  # that engine failed since
            return
        for progress in read:
            replica.deliver(progress, now)
            if progress.finished:
                self._unfinished -= 1
                if self._on_answer is not None:
                    self._on_answer()
                if self._arrivals is None:
                    self._send_next(now)

    def _fail(self, replica: Replica, now: float) -> None:
        assert self._failures is not None
        self._num_failures += 1
        self._router.remove(replica)
        self._turning.discard(id(replica))
        self._push(now + self._failures.restart, _Kind.RESTART, replica)
        for answer in replica.fail():
            self._route(answer, now)

    def _restart(self, replica: Replica, now: float) -> None:
        self._router.add(replica)
        self._push(now + self._lifetime(), _Kind.FAILURE, replica)
        waiting, self._waiting = self._waiting, deque()
        for answer in waiting:
            self._route(answer, now)
