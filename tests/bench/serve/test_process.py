"""Servers that the benchmark starts: ready when the block begins, gone when it ends, explained when they fail."""

import asyncio
import sys

import psutil
import pytest

from verax.bench.serve import process as module
from verax.bench.serve.http import fetch
from verax.bench.serve.process import raise_open_files, started
from verax.errors import VeraxError


def page(port):
    return [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]


def test_a_server_is_ready_in_the_block_and_gone_behind_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "health").write_text("ready")

    async def main():
        async with started(page) as server:
            text = await fetch(server.target, "/health")
            running = server.process.is_running()
            logged = server.log.read_text()
        return text, running, logged, server.process

    text, running, logged, process = asyncio.run(main())
    assert (text, running) == ("ready", True)
    assert "GET /health" in logged
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def start(command):
    async def main():
        async with started(command):
            pytest.fail("it cannot be ready")

    asyncio.run(main())


def test_a_server_that_ends_is_an_error_with_its_last_words():
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with pytest.raises(VeraxError, match="ended with status 3: no such model"):
        start(lambda port: command)


def test_a_server_that_is_never_ready_is_stopped_even_if_it_ignores_the_signal(monkeypatch):
    monkeypatch.setattr(module, "START", 0.5)
    monkeypatch.setattr(module, "STOP", 0.2)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    with pytest.raises(VeraxError, match="not ready after 0 s: deaf"):
        start(lambda port: [sys.executable, "-c", code])
    assert not [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def test_the_limit_of_open_files_is_the_systems():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        raise_open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
