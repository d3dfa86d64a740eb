"""Observation of a server under load, from outside: its memory, and requests that nobody waits for any more."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import psutil

from verax.bench.serve.client import Answer, ask
from verax.bench.serve.http import Target, fetch
from verax.bench.serve.traffic import Request
from verax.errors import VeraxError

__all__ = ["Monitor"]

INTERVAL = 0.5
"""Seconds between two looks."""

GRACE = 1.0
"""Seconds within which a server has to abort the request of a client that disconnected."""

DRAIN = 10.0
"""Seconds that a server is watched for after the last answer, until it has no request left."""

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
"""Gauges of `/metrics` that count the requests within the engine."""

MEMORY = "process_resident_memory_bytes"
"""Gauge of `/metrics` for a server whose process is not known: prometheus-client's."""


class Monitor:
    """Sends requests, and watches the server that they go to.

    Orphans are requests within the engine beyond those that clients wait for and those whose client disconnected less
    than `GRACE` ago. A server that aborts abandoned requests in time has none.
    """

    def __init__(self, target: Target, process: psutil.Process | None = None):
        """Watch a server.

        Args:
            target: the server.
            process: its process, whose memory is read with that of its children; None for what `/metrics` says.
        """
        self.target, self._process = target, process
        self._in_flight = 0
        self._disconnected: list[float] = []
        self._memory: list[int] = []
        self._most_orphans: int | None = None
        self._drain_s: float | None = None

    async def ask(self, request: Request) -> Answer:
        """Send a request, and count it while its client waits."""
        self._in_flight += 1
        try:
            answer = await ask(self.target, request)
        finally:
            self._in_flight -= 1
        if answer.left:
            self._disconnected.append(answer.ended)
        return answer

    async def watch(self) -> None:
        """Look at the server until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL)

    async def look(self) -> int | None:
        """Read memory and gauges once; requests within the engine, or None if the server does not say."""
        begin, waited_for = time.perf_counter(), self._in_flight
        gauges = await self._gauges()
        memory = self._resident(gauges)
        if memory is not None:
            self._memory.append(memory)
        if not all(name in gauges for name in GAUGES):
            return None
        inside = int(sum(gauges[name] for name in GAUGES))
        waited_for = max(waited_for, self._in_flight)
        self._disconnected = [when for when in self._disconnected if when >= begin - GRACE]
        orphans = max(0, inside - waited_for - len(self._disconnected))
        self._most_orphans = max(self._most_orphans or 0, orphans)
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
        values = [memory / 1e9 for memory in self._memory]
        memory = None
        if values:
            warm = values[len(values) // 4]
            memory = {"start_gb": values[0], "warm_gb": warm, "end_gb": values[-1], "peak_gb": max(values)}
        return {"memory": memory, "most_orphans": self._most_orphans, "drain_s": self._drain_s}

    async def _gauges(self) -> dict[str, float]:
        try:
            return _sums(await fetch(self.target, "/metrics"))
        except VeraxError:
            return {}

    def _resident(self, gauges: dict[str, float]) -> int | None:
        if self._process is None:
            return int(gauges[MEMORY]) if MEMORY in gauges else None
        return _resident_bytes(self._process)


def _sums(text: str) -> dict[str, float]:
    """Values of a Prometheus page by name, summed over their labels."""
    sums: dict[str, float] = {}
    for name, value in re.findall(r"(?m)^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", text):
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return sums


def _resident_bytes(process: psutil.Process) -> int | None:
    """Resident memory of a process and its children; None once it has ended."""
    try:
        family = [process, *process.children(recursive=True)]
        return sum(member.memory_info().rss for member in family)
    except psutil.Error:
        return None
