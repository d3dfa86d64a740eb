"""Images and clips of clients: data URIs, what is decoded, and the processes that decode."""

import asyncio
import base64
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.support.pictures import PICTURE, bomb, saved, write_video
from verax.errors import InvalidParameterError, QueueFullError
from verax.serve.video import decode as process
from verax.serve.video.decode import MediaDecoder, MediaLimits, decode, read_data_uri
from verax.video.files import write_clip

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("av")

LIMITS = MediaLimits(bytes=1 << 20, pixels=100_000, frames=8)


@pytest.mark.parametrize(("format", "error"), [("PNG", 0), ("JPEG", 80), ("WEBP", 80), ("GIF", 80)])
def test_an_image_is_one_frame(format, error):
    frames, fps = decode(saved(format), LIMITS)
    assert fps is None
    assert frames.shape == (1, *PICTURE.shape)
    assert np.abs(frames[0].astype(int) - PICTURE).mean() <= error


@pytest.mark.parametrize("other", [PICTURE // 2, PICTURE[:8, :8]])
def test_a_photo_with_another_picture_in_its_file_is_one_frame(other):
    data = saved("MPO", PIL.fromarray(PICTURE), save_all=True, append_images=[PIL.fromarray(other)])
    np.testing.assert_array_equal(decode(data, LIMITS).frames, decode(saved("JPEG"), LIMITS).frames)


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG", "AVIF"])
def test_frames_of_an_animation_last_as_long_as_they_are_shown(name):
    images = [PIL.fromarray(np.full((8, 8, 3), shade, np.uint8)) for shade in (10, 90, 170)]
    data = saved(name, images[0], save_all=True, append_images=images[1:], duration=[100, 300, 100])
    frames, fps = decode(data, LIMITS)
    assert fps == 10
    assert [round(frame.mean(), -1) for frame in frames] == [10] + [90] * 3 + [170]
    with pytest.raises(InvalidParameterError, match="which are 5 frames of the shortest; expected at most 4"):
        decode(data, replace(LIMITS, frames=4))


def test_a_video_is_its_main_stream_at_even_times(tmp_path):
    write_video(tmp_path / "a.mkv", [0, 100, 150, 160, 400, 500], cover=True)
    frames, fps = decode((tmp_path / "a.mkv").read_bytes(), LIMITS)
    assert fps == pytest.approx(10)
    assert [round(frame.mean() / 40) for frame in frames] == [0, 1, 3, 3, 4, 5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "expected a PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "expected a PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "expected a PNG, JPEG"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "expected a PNG, JPEG"),
        (b"", "expected a PNG, JPEG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "expected a PNG, JPEG"),  # FFmpeg gives one of its tiles
        (saved("PNG")[:300], "cannot be decoded"),
        (saved("JPEG")[:80], "cannot be decoded"),
        (b"\0\0\0\x18ftypisom" + b"0" * 100, "cannot be decoded"),
        (b"\x1a\x45\xdf\xa3" + b"0" * 100, "cannot be decoded"),
        (bomb(30_000, 30_000), "more than 100000 pixels|cannot be decoded"),
        (bomb(400, 300), "more than 100000 pixels"),
        (saved("PNG", np.zeros((2, 100, 3), np.uint8)), "the longer side is more than 8 times the shorter"),
        (b"\x89PNG\r\n\x1a\n" + bytes(1 << 20), "more than 1048576 bytes"),
    ],
)
def test_what_is_not_a_picture_damaged_or_too_large_is_refused(data, message):
    with pytest.raises(InvalidParameterError, match=message):
        decode(data, LIMITS)


def test_a_clip_is_bounded_in_frames_and_in_pixels_of_all_frames(tmp_path):
    data = write_clip(np.tile(PICTURE, (9, 1, 1, 1)), tmp_path / "clip.mp4", fps=8).read_bytes()
    with pytest.raises(InvalidParameterError, match="more than 8 frames"):
        decode(data, LIMITS)
    with pytest.raises(InvalidParameterError, match="more than 4000 pixels, all frames together"):
        decode(data, MediaLimits(pixels=4000))


def test_the_process_brings_no_jax():
    code = "import sys, verax.serve.video.decode; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("kind", ["image/png", "video/mp4", "image/svg+xml", "application/octet-stream;name=a.png"])
def test_the_contents_come_back(kind):
    data = bytes(range(256))
    assert read_data_uri(f"data:{kind};base64,{base64.b64encode(data).decode()}", name="image") == data


@pytest.mark.parametrize(
    "uri",
    [
        *("http://169.254.169.254/", "https://example.com/a.png", "file:///etc/passwd", "/etc/passwd", ""),
        *("data:image/png,abc", "data:;base64,QUJD", "data:image/png;base64", "data:image/png;base64,QUJ", "data:"),
        *("data:image/png;base64,QU\nJD", "data:image/png;base64,§§§§", "data:" + "a" * 10_000 + "/png;base64,QUJD"),
    ],
)
def test_anything_else_is_refused(uri):
    with pytest.raises(InvalidParameterError, match=r"^image: "):
        read_data_uri(uri, name="image")


@pytest.mark.parametrize(
    ("data", "limits", "message"),
    [
        (b"", {}, "^input_reference: the file is empty"),
        (b"GIF8", {}, "^input_reference: the file cannot be decoded"),
        (saved("PNG"), {"bytes": 100}, "^input_reference: the file has more than 100 bytes"),
        (saved("PNG"), {"memory": 100 << 20}, "^input_reference: .*(memory|ended with)"),
    ],
)
async def test_errors_begin_with_the_field(data, limits, message):
    with pytest.raises(InvalidParameterError, match=message):
        await MediaDecoder(MediaLimits(**limits)).decode(data, name="input_reference")


async def test_a_process_that_is_killed_costs_one_request():
    decoder = MediaDecoder()
    task = asyncio.create_task(decoder.decode(saved("PNG"), name="input_reference"))
    while not decoder.pids:
        await asyncio.sleep(0.001)
    os.kill(next(iter(decoder.pids)), signal.SIGKILL)
    with pytest.raises(InvalidParameterError, match=r"^input_reference: its decoder ended with signal SIGKILL"):
        await task
    assert not decoder.pids
    assert (await decoder.decode(saved("PNG"), name="input_reference")).frames.shape == (1, *PICTURE.shape)


async def test_a_process_that_takes_too_long_or_is_not_wanted_any_more_is_killed():
    decoder = MediaDecoder(MediaLimits(seconds=0))
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


async def test_files_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(process, "MAX_FILES", 1)
    decoder = MediaDecoder()
    first = asyncio.create_task(decoder.decode(saved("PNG"), name="image"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="1 files wait"):
        await decoder.decode(saved("PNG"), name="image")
    await first
    await decoder.decode(saved("PNG"), name="image")


async def test_the_process_gets_no_secrets(monkeypatch):
    monkeypatch.setenv("VERAX_API_KEY", "secret")
    given = {}

    async def start(*command, env, **pipes):
        given.update(env)
        raise OSError("not started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(OSError, match="not started"):
        await MediaDecoder().decode(saved("PNG"), name="image")
    assert "PATH" in given
    assert "secret" not in given.values()
