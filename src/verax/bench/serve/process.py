"""Servers that a benchmark starts itself, on a free port of this machine, and stops by their process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from verax.bench.serve.http import Target, fetch
from verax.errors import VeraxError

__all__ = ["StartedServer", "raise_open_files", "started"]

START = 900.0
"""Seconds until a server has to be healthy: the first start of a large model compiles for minutes."""

STOP = 30.0
"""Seconds that a server has for its end after SIGTERM."""

LOG_LINES = 12
"""Last lines of a failed server's output that its error repeats."""


@dataclass(frozen=True)
class StartedServer:
    """A server of the benchmark's own."""

    target: Target
    process: psutil.Process
    log: Path
    """File of what it prints, which is gone after its end."""


def raise_open_files() -> None:
    """Raise this process's limit of open files, which its children inherit, as far as the system lets it."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.asynccontextmanager
async def started(command: Callable[[int], Sequence[str]], *, health: str = "/health") -> AsyncIterator[StartedServer]:
    """A server that runs while the block does.

    Args:
        command: its command line, given a port.
        health: path that answers 200 once the server is ready.

    Raises:
        VeraxError: if it ends by itself or is not ready in time; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder:
        log = Path(folder) / "log"
        port = _free_port()
        words = list(command(port))
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            target = Target("127.0.0.1", port)
            await _ready(target, health, process, words[0], log)
            yield StartedServer(target, psutil.Process(process.pid), log)
        finally:
            _stop(process)


async def _ready(target: Target, health: str, process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    begin = time.monotonic()
    while True:
        with contextlib.suppress(VeraxError):
            await fetch(target, health)
            return
        if process.poll() is not None:
            raise VeraxError(f"{name}: ended with status {process.returncode}: {_tail(log)}")
        if time.monotonic() - begin > START:
            raise VeraxError(f"{name}: not ready after {START:.0f} s: {_tail(log)}")
        await asyncio.sleep(0.2)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join(lines[-LOG_LINES:]) or "it printed nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
