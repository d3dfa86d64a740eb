"""A chat whose events are written down, in place of an engine's, and a server on a free port."""

import threading
import time
from contextlib import contextmanager

import uvicorn

from verax.serve.text.run import RunEvent, Usage
from verax.text.features.tool_calls import Delta, ToolCallDelta


def call(index, *arguments, name="weather"):
    """Deltas of a call, one for each piece of its arguments."""
    first = Delta(tool_calls=(ToolCallDelta(index, f"call_{index}", name),))
    return [first, *(Delta(tool_calls=(ToolCallDelta(index, arguments=piece),)) for piece in arguments)]


class ScriptedRun:
    """As `Run`, with given deltas. An exception among them is raised in its place."""

    id, model, created = "1", "tiny", 1_700_000_000

    def __init__(self, deltas, finish_reason="stop", stop_reason=None):
        self.usage = Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
        self._deltas = deltas
        self._last = RunEvent(0, Delta(), finish_reason, stop_reason)

    async def events(self):
        for delta in self._deltas:
            if isinstance(delta, Exception):
                raise delta
            yield RunEvent(0, delta)
        yield self._last


def scripted(monkeypatch, module, run):
    """Let a dialect answer with this run."""

    async def run_chat(*arguments):
        return run

    monkeypatch.setattr(module, "run_chat", run_chat)


@contextmanager
def running(app, lifespan="off"):
    """Address of a server of the application, on a free port of this machine."""
    options = {"host": "127.0.0.1", "port": 0, "log_level": "critical", "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(app, lifespan=lifespan, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
