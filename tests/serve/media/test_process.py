"""`MediaDecoder`: its process may be killed, crash, hang or run out of memory, and costs one request each time."""

import asyncio
import os
import signal

import numpy as np
import pytest

from tests.support.pictures import PICTURE, saved
from verax.errors import InvalidParameterError, QueueFullError
from verax.serve.video import decode as process
from verax.serve.video.decode import MediaDecoder, MediaLimits

pytest.importorskip("PIL.Image")


def decode(data, **limits):
    return asyncio.run(MediaDecoder(MediaLimits(**limits)).decode(data, name="input_reference"))


def test_frames_come_back_whole():
    np.testing.assert_array_equal(decode(saved("PNG")), PICTURE[None])


@pytest.mark.parametrize(
    ("data", "limits", "message"),
    [
        (b"", {}, "^input_reference: the file is empty"),
        (b"GIF8", {}, "^input_reference: the file cannot be decoded"),
        (saved("PNG"), {"bytes": 100}, "^input_reference: the file has more than 100 bytes"),
        (saved("PNG"), {"memory": 100 << 20}, "^input_reference: .*(memory|ended with)"),
    ],
)
def test_errors_begin_with_the_field(data, limits, message):
    with pytest.raises(InvalidParameterError, match=message):
        decode(data, **limits)


def test_a_process_that_is_killed_costs_one_request():
    decoder = MediaDecoder()

    async def main():
        task = asyncio.create_task(decoder.decode(saved("PNG"), name="input_reference"))
        while not decoder.pids:
            await asyncio.sleep(0.001)
        os.kill(next(iter(decoder.pids)), signal.SIGKILL)
        with pytest.raises(InvalidParameterError, match=r"^input_reference: its decoder ended with signal SIGKILL"):
            await task
        assert not decoder.pids
        return await decoder.decode(saved("PNG"), name="input_reference")

    assert asyncio.run(main()).shape == (1, *PICTURE.shape)


def test_a_process_that_takes_too_long_or_is_no_longer_wanted_is_killed():
    decoder = MediaDecoder(MediaLimits(seconds=0))

    async def main():
        with pytest.raises(InvalidParameterError, match="decoding took more than 0 seconds"):
            await decoder.decode(saved("PNG"), name="image")
        wanted = MediaDecoder()
        task = asyncio.create_task(wanted.decode(saved("PNG"), name="image"))
        while not wanted.pids:
            await asyncio.sleep(0.001)
        (pid,) = wanted.pids
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


def test_files_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(process, "MAX_FILES", 1)
    decoder = MediaDecoder()

    async def main():
        first = asyncio.create_task(decoder.decode(saved("PNG"), name="image"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="1 files wait"):
            await decoder.decode(saved("PNG"), name="image")
        await first
        await decoder.decode(saved("PNG"), name="image")

    asyncio.run(main())


def test_the_process_gets_no_secrets(monkeypatch):
    monkeypatch.setenv("VERAX_API_KEY", "secret")
    given = {}

    async def start(*command, env, **pipes):
        given.update(env)
        raise OSError("not started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(OSError, match="not started"):
        decode(saved("PNG"))
    assert "PATH" in given
    assert "secret" not in given.values()
