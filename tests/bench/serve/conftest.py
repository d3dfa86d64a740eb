"""Answers with known times, and a fake server in a thread of its own."""

import asyncio
import contextlib
import threading

from verax.bench.serve.load import Answer, Request


def answer(number, first, gap, tokens, **changes):
    """An answer whose first token takes `first` seconds, and each further one `gap`."""
    record = Answer(Request(number, (5,), tokens, slow=changes.pop("slow", False)), sent=10.0)
    record.events = [10.0 + first + gap * n for n in range(tokens)]
    record.ended = record.events[-1] + 0.5
    record.completion_tokens = tokens
    for name, value in changes.items():
        setattr(record, name, value)
    return record


@contextlib.contextmanager
def in_a_thread(server):
    """Base URL of a fake server that runs in another thread."""
    ready, over, started = threading.Event(), asyncio.Event(), []

    async def main():
        async with server.serving() as client:
            started.extend([asyncio.get_running_loop(), client.url])
            ready.set()
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    ready.wait()
    try:
        yield started[1]
    finally:
        started[0].call_soon_threadsafe(over.set)
        thread.join()
