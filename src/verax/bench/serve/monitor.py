"""Observation of a server under load, from outside: its memory, and requests that nobody waits for any more."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import psutil

from verax.bench.serve.abandoned import GRACE, abort_times, read_ends
from verax.bench.serve.client import Answer, ask
from verax.bench.serve.http import Target, fetch
from verax.bench.serve.process import StartedServer
from verax.bench.serve.traffic import Request
from verax.errors import VeraxError

__all__ = ["Monitor"]

INTERVAL = 0.5
"""Seconds between two looks."""

DRAIN = 10.0
"""Seconds that a server is watched for after the last answer, until it has no request left."""

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
"""Gauges of `/metrics` that count the requests within the engine."""

FINISHED = "vllm:request_success_total"
"""Counter of `/metrics` of ended requests, by `finished_reason`."""

MEMORY = "process_resident_memory_bytes"
"""Gauge of `/metrics` for a server whose process is not known: prometheus-client's."""

POINTS = 61
"""Most values of the memory in a report, evenly spread over the time."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Monitor:
    """Sends requests, and watches the server that they go to.

    Orphans are requests within the engine beyond those that clients wait for and those whose client disconnected less
    than `GRACE` ago. A server that aborts abandoned requests in time has none.
    """

    def __init__(self, target: Target, server: StartedServer | None = None):
        """Watch a server.

        Args:
            target: the server.
            server: its process, whose memory is read with that of its children, and its log, which has the end of each
                request; None for what `/metrics` says.
        """
        self.target, self._server = target, server
        self._in_flight = 0
        self._num_completed = 0
        self._left: dict[str, float] = {}
        """Unix time at which each client disconnected, by the id of its request."""
        self._disconnected: list[float] = []
        self._memory: list[tuple[float, int]] = []
        self._most_orphans: int | None = None
        self._num_looks = 0
        self._finished: list[dict[str, float]] = []
        self._drain_s: float | None = None

    async def ask(self, request: Request) -> Answer:
        """Send a request, and count it while its client waits."""
        self._in_flight += 1
        try:
            answer = await ask(self.target, request)
        finally:
            self._in_flight -= 1
        self._num_completed += answer.completed
        if answer.left:
            self._disconnected.append(answer.ended)
            self._left[answer.request_id] = time.time() - (time.perf_counter() - answer.ended)
        return answer

    async def tokenize(self, text: str) -> list[int] | None:
        """Token ids of a text by the server's `/tokenize`; None if it has none, or not as vLLM has it."""
        body = {"prompt": text, "add_special_tokens": False}
        try:
            answer = msgspec.json.decode(await fetch(self.target, "/tokenize", body=body), type=_Tokens)
        except (VeraxError, msgspec.MsgspecError):
            return None
        return answer.tokens

    async def watch(self) -> None:
        """Look at the server until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL)

    async def look(self) -> int | None:
        """Read memory and metrics once; requests within the engine, or None if the server does not say."""
        begin, waited_for = time.perf_counter(), self._in_flight
        samples = await self._samples()
        gauges = _sums(samples)
        memory = self._resident(gauges)
        if memory is not None:
            self._memory.append((time.perf_counter(), memory))
        if FINISHED in gauges:
            self._finished = [*self._finished[:1], _by_reason(samples)]
        if not all(name in gauges for name in GAUGES):
            return None
        inside = int(sum(gauges[name] for name in GAUGES))
        waited_for = max(waited_for, self._in_flight)
        self._disconnected = [when for when in self._disconnected if when >= begin - GRACE]
        orphans = max(0, inside - waited_for - len(self._disconnected))
        self._most_orphans = max(self._most_orphans or 0, orphans)
        self._num_looks += 1
        return inside

    async def drained(self) -> None:
        """Wait until the server has no request left, at most `DRAIN` seconds."""
        begin = time.perf_counter()
        while (inside := await self.look()) and time.perf_counter() - begin < DRAIN:
            await asyncio.sleep(INTERVAL / 10)
        if inside == 0:
            self._drain_s = time.perf_counter() - begin

    def report(self) -> dict[str, Any]:
        """Memory of the server and its abandoned requests, as JSON holds them; None for what it did not say.

        The server counts as warm after the first quarter of the time.
        """
        return {
            "memory": self._memory_report(),
            "most_orphans": self._most_orphans,
            "looks": self._num_looks,
            "drain_s": self._drain_s,
            "abandoned": self._abandoned(),
        }

    def _memory_report(self) -> dict[str, Any] | None:
        if not self._memory:
            return None
        begin = self._memory[0][0]
        values = [(when - begin, memory / 1e9) for when, memory in self._memory]
        step = max(1, -(-len(values) // (POINTS - 1)))
        warm = next(memory for when, memory in values if when >= values[-1][0] / 4)
        return {
            "start_gb": values[0][1],
            "warm_gb": warm,
            "end_gb": values[-1][1],
            "peak_gb": max(memory for _, memory in values),
            "over_time": [[round(when, 1), round(memory, 4)] for when, memory in [*values[:-1:step], values[-1]]],
        }

    def _abandoned(self) -> dict[str, Any] | None:
        """When the requests of clients that disconnected ended; None without such clients, or without a word on it."""
        found: dict[str, Any] = {}
        if self._left and self._server is not None:
            found = abort_times(self._left, read_ends(self._server.log))
        if self._left and self._finished:
            first, last = self._finished[0], self._finished[-1]
            ended = {reason: count - first.get(reason, 0.0) for reason, count in last.items()}
            found["engine_aborts"] = int(ended.pop("abort", 0))
            found["ran_to_their_end"] = max(0, int(sum(ended.values())) - self._num_completed)
        return found or None

    async def _samples(self) -> list[_Sample]:
        try:
            return list(_parsed(await fetch(self.target, "/metrics")))
        except VeraxError:
            return []

    def _resident(self, gauges: dict[str, float]) -> int | None:
        if self._server is None:
            return int(gauges[MEMORY]) if MEMORY in gauges else None
        return _resident_bytes(self._server.process)


_Sample = tuple[str, str, float]
"""Name, labels and value of a line of `/metrics`."""


def _parsed(text: str) -> Iterator[_Sample]:
    for name, labels, value in re.findall(r"(?m)^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", text):
        try:
            yield name, labels, float(value)
        except ValueError:
            continue


def _sums(samples: Iterable[_Sample]) -> dict[str, float]:
    """Values by name, summed over their labels."""
    sums: dict[str, float] = {}
    for name, _, value in samples:
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _by_reason(samples: Iterable[_Sample]) -> dict[str, float]:
    """Ended requests by `finished_reason`."""
    found = {}
    for name, labels, value in samples:
        if name == FINISHED and (reason := re.search(r'finished_reason="(\w+)"', labels)):
            found[reason[1]] = value
    return found


def _resident_bytes(process: psutil.Process) -> int | None:
    """Resident memory of a process and its children; None once it has ended."""
    try:
        family = [process, *process.children(recursive=True)]
        return sum(member.memory_info().rss for member in family)
    except psutil.Error:
        return None
