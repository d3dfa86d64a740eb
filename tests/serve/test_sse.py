"""Streams of events, and clients that go away."""

import asyncio

import pytest

from verax.serve.http.errors import ApiError
from verax.serve.http.sse import DONE, PING, ClientDisconnectedError, EventStream, data_event, named_event


class Client:
    """The other end of a connection: keeps what it is sent."""

    def __init__(self, *, reads=True):
        self.messages = []
        self.reads = reads
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.messages.append(message)
        if not self.reads:
            await asyncio.Event().wait()

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.messages)


class Source:
    """Events with what happened to the generator."""

    def __init__(self, *events):
        self.given = events
        self.closed = False

    async def events(self):
        try:
            for event in self.given:
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, float):
                    await asyncio.sleep(event)
                else:
                    yield event
        finally:
            self.closed = True


def stream(source, client, **options):
    return EventStream(source.events(), **options)({"type": "http"}, client.receive, client.send)


def test_events_are_sent_as_they_come_and_the_headers_keep_proxies_from_buffering():
    async def main():
        client, source = Client(), Source(data_event({"a": 1}), named_event("x", {}), DONE)
        await stream(source, client)
        assert client.body == b'data: {"a":1}\n\nevent: x\ndata: {}\n\ndata: [DONE]\n\n'
        headers = dict(client.messages[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"cache-control"] == b"no-cache"
        assert headers[b"x-accel-buffering"] == b"no"
        assert b"content-length" not in headers
        assert not client.messages[-1]["more_body"]
        assert source.closed

    asyncio.run(main())


def test_an_error_before_the_first_event_is_raised_and_a_later_one_is_an_event():
    async def main():
        with pytest.raises(ApiError):
            await stream(Source(ApiError(400, "n: wrong")), Client())
        client = Client()
        await stream(Source(DONE, ApiError(500, "broken")), client)
        assert b'data: {"error":{"message":"broken"' in client.body

    asyncio.run(main())


def test_a_silent_stream_begins_and_sends_pings(monkeypatch):
    monkeypatch.setattr("verax.serve.http.sse.HEADERS_AFTER", 0.01)

    async def main():
        client = Client()
        await stream(Source(0.2, DONE), client, ping_interval=0.02)
        assert client.body.startswith(PING + PING)
        assert client.body.endswith(DONE)

    asyncio.run(main())


def test_a_client_that_goes_away_closes_the_generator():
    async def main():
        client, source = Client(), Source(DONE, 100.0)
        running = asyncio.create_task(stream(source, client))
        while not client.messages:
            await asyncio.sleep(0)
        client.gone.set()
        await running
        assert source.closed
        early, unstarted = Client(), Source(100.0)
        early.gone.set()
        with pytest.raises(ClientDisconnectedError):
            await stream(unstarted, early)

    asyncio.run(main())


def test_a_client_that_does_not_read_is_given_up():
    async def main():
        client, source = Client(reads=False), Source(DONE, DONE)
        await stream(source, client, slow_client_timeout=0.05)
        assert source.closed
        assert len(client.messages) == 1

    asyncio.run(main())
