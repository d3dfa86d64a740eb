"""Decoding of clients' files: formats, limits, and files made to do harm."""

import subprocess
import sys

import numpy as np
import pytest

from tests.support.pictures import PICTURE, bomb, saved
from verax.errors import InvalidParameterError
from verax.serve.video.decode import MediaLimits, decode
from verax.video.files import write_clip

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("av")

LIMITS = MediaLimits(bytes=1 << 20, pixels=100_000, frames=8)


def clip_file(folder, suffix, frames=5):
    path = folder / f"clip{suffix}"
    write_clip(np.tile(PICTURE, (frames, 1, 1, 1)), path, fps=8)
    return path.read_bytes()


@pytest.mark.parametrize(("format", "error"), [("PNG", 0), ("JPEG", 80), ("WEBP", 80), ("GIF", 80)])
def test_an_image_is_one_frame(format, error):
    frames = decode(saved(format), LIMITS)
    assert frames.shape == (1, *PICTURE.shape)
    assert np.abs(frames[0].astype(int) - PICTURE).mean() <= error


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ".webp"])
def test_a_clip_is_its_frames(tmp_path, suffix):
    frames = decode(clip_file(tmp_path, suffix), LIMITS)
    # Animations may merge frames that are equal.
    assert frames.shape[1:] == PICTURE.shape
    assert len(frames) == 5 or suffix != ".mp4"


def test_an_image_is_turned_upright():
    exif = PIL.Exif()
    exif[0x0112] = 6
    assert decode(saved("JPEG", exif=exif), LIMITS).shape == (1, 40, 24, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "expected a PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "expected a PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "expected a PNG, JPEG"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "expected a PNG, JPEG"),
        (b"", "expected a PNG, JPEG"),
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
def test_what_is_no_picture_damaged_or_too_large_is_refused(data, message):
    with pytest.raises(InvalidParameterError, match=message):
        decode(data, LIMITS)


def test_a_clip_is_bounded_in_frames_and_in_pixels_of_all_frames(tmp_path):
    data = clip_file(tmp_path, ".mp4", frames=9)
    with pytest.raises(InvalidParameterError, match="more than 8 frames"):
        decode(data, LIMITS)
    with pytest.raises(InvalidParameterError, match="more than 4000 pixels, all frames together"):
        decode(data, MediaLimits(pixels=4000))


def test_the_process_brings_no_jax():
    code = "import sys, verax.serve.video.decode; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
