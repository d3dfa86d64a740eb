"""Streams that go on while nobody reads them. Limits of time are zero or an hour: no test waits."""

import asyncio

import pytest

from verax.errors import InvalidParameterError
from verax.serve.http.sse import RunningStreams

ID = "conversation-0001"
HOUR = 3600.0


class Source:
    """Frames that are made as the test lets them."""

    def __init__(self):
        self.queue = asyncio.Queue()
        self.closed = False

    async def frames(self):
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True

    def put(self, *items):
        for item in items:
            self.queue.put_nowait(item)


def streams(**limits):
    return RunningStreams(**{"abandoned_after": HOUR, "kept_after": HOUR} | limits)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def joined(reader):
    return b"".join([chunk async for chunk in reader])


def test_a_stream_goes_on_without_its_reader_and_is_read_again_from_any_byte():
    async def main():
        store, source = streams(), Source()
        reader = store.start(ID, source.frames())
        source.put(b"one ")
        assert await anext(reader) == b"one "
        await reader.aclose()
        source.put(b"two ", b"three", None)
        await settle()
        assert await joined(store.follow(ID)) == b"one two three"
        assert await joined(store.follow(ID, 6)) == b"o three"
        assert source.closed
        await store.close()

    asyncio.run(main())


def test_two_readers_get_the_same_bytes():
    async def main():
        store, source = streams(), Source()
        first = asyncio.create_task(joined(store.start(ID, source.frames())))
        source.put(b"a")
        await settle()
        second = asyncio.create_task(joined(store.follow(ID)))
        source.put(b"b", None)
        assert await first == await second == b"ab"
        await store.close()

    asyncio.run(main())


def test_stop_closes_the_source_and_ends_the_readers():
    async def main():
        store, source = streams(), Source()
        reader = asyncio.create_task(joined(store.start(ID, source.frames())))
        source.put(b"a")
        await settle()
        assert store.stop(ID)
        assert await reader == b"a"
        assert source.closed
        assert not store.stop(ID)
        with pytest.raises(KeyError):
            store.follow(ID)

    asyncio.run(main())


def test_an_abandoned_stream_is_closed():
    async def main():
        store, source = streams(abandoned_after=0.0), Source()
        reader = store.start(ID, source.frames())
        source.put(b"a")
        assert await anext(reader) == b"a"
        await reader.aclose()
        await asyncio.sleep(0.01)
        assert source.closed

    asyncio.run(main())


def test_a_stream_that_is_over_is_forgotten():
    async def main():
        store, source = streams(kept_after=0.0), Source()
        source.put(b"a", None)
        assert await joined(store.start(ID, source.frames())) == b"a"
        await asyncio.sleep(0.01)
        with pytest.raises(KeyError):
            store.follow(ID)

    asyncio.run(main())


def test_an_error_reaches_every_reader():
    async def main():
        store, source = streams(), Source()
        reader = store.start(ID, source.frames())
        source.put(b"a", ValueError("broken"))
        for one in (reader, store.follow(ID)):
            with pytest.raises(ValueError, match="broken"):
                await joined(one)
        await store.close()

    asyncio.run(main())


def test_only_the_last_bytes_are_kept():
    async def main():
        store, source = streams(max_bytes=4), Source()
        reader = store.start(ID, source.frames())
        source.put(b"abc", b"def", None)
        await settle()
        assert await joined(store.follow(ID, 2)) == b"cdef"
        with pytest.raises(InvalidParameterError, match=r"^from: 1 is not within 2 to 6"):
            store.follow(ID, 1)
        with pytest.raises(InvalidParameterError, match=r"^stream: read too slowly"):
            await joined(reader)
        await store.close()

    asyncio.run(main())


def test_a_second_stream_of_an_id_replaces_the_first():
    async def main():
        store, old, new = streams(), Source(), Source()
        reader = asyncio.create_task(joined(store.start(ID, old.frames())))
        old.put(b"old")
        await settle()
        new.put(b"new", None)
        assert await joined(store.start(ID, new.frames())) == b"new"
        assert await reader == b"old"
        assert old.closed
        assert await joined(store.follow(ID)) == b"new"
        await store.close()

    asyncio.run(main())


def test_without_an_id_and_over_the_limit_the_frames_are_not_kept():
    async def main():
        store, source = streams(max_streams=1), Source()
        for conv_id in (None, ID, "conversation-0002"):
            source.put(b"a", None)
            assert await joined(store.start(conv_id, source.frames())) == b"a"
        store.follow(ID)
        with pytest.raises(KeyError):
            store.follow("conversation-0002")
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("conv_id", ["", "short", "a" * 129, "../../etc/passwd-12", "ünïcödé-ünïcödé-ü"])
def test_an_id_must_be_hard_to_guess_and_plain(conv_id):
    async def main():
        with pytest.raises(InvalidParameterError, match=r"^X-Conversation-Id: use 16 to 128"):
            streams().start(conv_id, Source().frames())

    asyncio.run(main())


def test_closing_stops_everything():
    async def main():
        store, source = streams(), Source()
        reader = asyncio.create_task(joined(store.start(ID, source.frames())))
        await settle()
        await store.close()
        assert await reader == b""
        assert source.closed

    asyncio.run(main())
