"""Lines that a thread reads: their order, how many are held, pipes that wait, and failures."""

import asyncio
import io
import itertools
import os
import threading

import pytest

from verax.batch.run import AHEAD, read_lines


def collect(file, most=None):
    async def main():
        found = []
        async for line in read_lines(file):
            found.append(line)
            if len(found) == most:
                break
        return found

    return asyncio.run(main())


def test_lines_come_in_their_order_and_the_file_is_closed():
    file = io.BytesIO(b"".join(b"%d\n" % i for i in range(500)) + b"last")
    lines = collect(file)
    assert lines == [*(b"%d\n" % i for i in range(500)), b"last"]
    assert file.closed


class Endless(io.RawIOBase):
    """A file without an end, which counts what was read."""

    def __init__(self):
        self.num_read = 0

    def __next__(self):
        self.num_read += 1
        return b"line\n"


def test_few_lines_are_read_ahead():
    file = Endless()
    assert len(collect(file, most=3)) == 3
    assert file.num_read <= 3 + AHEAD + 2


def test_a_pipe_that_waits_does_not_hold_up_the_others():
    reading, writing = os.pipe()

    async def main():
        lines = read_lines(os.fdopen(reading, "rb"))
        waiting = asyncio.create_task(anext(lines))
        await asyncio.sleep(0)  # the event loop goes on
        assert not waiting.done()
        os.write(writing, b"now\n")
        assert await waiting == b"now\n"

    asyncio.run(main())  # it ends, though the pipe is open
    os.close(writing)


def test_a_failure_is_raised_behind_the_lines_before_it():
    class Failing(io.RawIOBase):
        def __iter__(self):
            yield b"first\n"
            raise OSError("device lost")

    async def main():
        lines = read_lines(Failing())
        assert await anext(lines) == b"first\n"
        with pytest.raises(OSError, match="device lost"):
            await anext(lines)

    asyncio.run(main())


def test_the_thread_ends_with_the_event_loop():
    names = {thread.name for thread in threading.enumerate()}
    collect(Endless(), most=1)
    for _ in itertools.repeat(None, 500):
        left = [thread for thread in threading.enumerate() if thread.name == "verax-batch-reader"]
        if not left:
            break
        left[0].join(0.02)
    assert {thread.name for thread in threading.enumerate()} <= names
