"""Server-sent events, clients that go away, and streams that outlive their connection."""

import asyncio
import time

import pytest

from verax.errors import InvalidParameterError
from verax.serve.http.errors import ApiError
from verax.serve.http.sse import DONE, PING, EventStream, RunningStreams, data_event, named_event


class Client:
    """The other end of a connection: keeps what it is sent."""

    def __init__(self, *, reads=True):
        self.messages = []
        self.reads = reads
        self.gone = asyncio.Event()
        self.resumed = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.messages.append(message)
        if not self.reads:
            await self.resumed.wait()

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.messages)


async def events(*given):
    """Events with the errors and the seconds that pass between them."""
    for event in given:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, float):
            await asyncio.sleep(event)
        else:
            yield event


def stream(source, client, **options):
    return EventStream(source, **options)({"type": "http", "path": "/"}, client.receive, client.send)


async def test_events_are_sent_as_they_come_and_the_headers_keep_proxies_from_buffering():
    client, source = Client(), events(data_event({"a": 1}), named_event("x", {}), DONE)
    await stream(source, client)
    assert client.body == b'data: {"a":1}\n\nevent: x\ndata: {}\n\ndata: [DONE]\n\n'
    headers = dict(client.messages[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers
    assert not client.messages[-1]["more_body"]
    assert source.ag_frame is None  # it was closed


async def test_an_error_before_the_first_event_is_raised_and_a_later_one_is_an_event():
    with pytest.raises(ApiError):
        await stream(events(ApiError(400, "n: wrong")), Client())
    client = Client()
    await stream(events(DONE, ApiError(500, "broken")), client)
    assert b'data: {"error":{"message":"broken"' in client.body


async def test_a_silent_stream_begins_and_sends_pings(monkeypatch):
    monkeypatch.setattr("verax.serve.http.sse.HEADERS_AFTER", 0.01)

    client = Client()
    await stream(events(0.2, DONE), client, ping_interval=0.02)
    assert client.body.startswith(PING + PING)
    assert client.body.endswith(DONE)


async def test_a_client_whose_reading_was_not_seen_while_the_machine_stood_still_is_not_given_up():
    client, source = Client(reads=False), events(DONE, DONE)
    running = asyncio.create_task(stream(source, client, slow_client_timeout=0.05))
    while not client.messages:
        await asyncio.sleep(0)
    time.sleep(0.2)
    client.reads = True
    asyncio.get_running_loop().call_later(0.02, client.resumed.set)
    await running
    assert client.body.count(DONE) == 2


async def test_a_client_that_does_not_read_is_given_up():
    client, source = Client(reads=False), events(DONE, DONE)
    await stream(source, client, slow_client_timeout=0.05)
    assert source.ag_frame is None  # it was closed
    assert len(client.messages) == 1


ID = "conversation-0001"
HOUR = 3600.0


def streams(**limits):
    return RunningStreams(**{"abandoned_after": HOUR, "kept_after": HOUR} | limits)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def joined(reader):
    return b"".join([chunk async for chunk in reader])


async def test_a_stream_continues_without_its_reader_and_is_read_again_from_any_byte():
    store, source = streams(), events(b"one ", 0.01, b"two ", b"three")
    reader = store.start(ID, source)
    assert await anext(reader) == b"one "
    await reader.aclose()
    assert await joined(store.follow(ID)) == b"one two three"
    assert await joined(store.follow(ID, 6)) == b"o three"
    assert source.ag_frame is None
    await store.close()


async def test_an_abandoned_stream_is_closed():
    store, source = streams(abandoned_after=0.0), events(b"a", HOUR)
    reader = store.start(ID, source)
    assert await anext(reader) == b"a"
    await reader.aclose()
    await asyncio.sleep(0.01)
    assert source.ag_frame is None


async def test_only_the_last_bytes_are_kept():
    store = streams(max_bytes=4)
    reader = store.start(ID, events(b"abc", b"def"))
    await settle()
    assert await joined(store.follow(ID, 2)) == b"cdef"
    with pytest.raises(InvalidParameterError, match=r"^from: 1 is not within 2 to 6"):
        store.follow(ID, 1)
    with pytest.raises(InvalidParameterError, match=r"^stream: read too slowly"):
        await joined(reader)
    await store.close()


async def test_without_an_id_and_over_the_limit_the_frames_are_not_kept():
    store = streams(max_streams=1)
    for conv_id in (None, ID, "conversation-0002"):
        assert await joined(store.start(conv_id, events(b"a"))) == b"a"
    store.follow(ID)
    with pytest.raises(KeyError):
        store.follow("conversation-0002")
    await store.close()


@pytest.mark.parametrize("conv_id", ["", "short", "a" * 129, "../../etc/passwd-12", "ünïcödé-ünïcödé-ü"])
async def test_an_id_must_be_hard_to_guess_and_plain(conv_id):
    with pytest.raises(InvalidParameterError, match=r"^X-Conversation-Id: use 16 to 128"):
        streams().start(conv_id, events())
