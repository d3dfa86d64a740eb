"""Decoding of images and clips that come from clients.

`python -m verax.serve.video.media.decode LIMITS` is the program of the process that `process.py` starts: a file on
standard input, frames on standard output. It imports no JAX, opens no file or address, and limits its own memory and
time.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from jaxtyping import UInt8

from verax._optional import require_optional
from verax.errors import InvalidParameterError, VeraxError
from verax.video.images import read_image

__all__ = ["MediaLimits", "decode", "main"]

_FILES = 64
"""File descriptors of the process: the libraries of decoders that are loaded late need some."""


@dataclass(frozen=True)
class MediaLimits:
    """Limits on one image or clip of a client."""

    bytes: int = 32 << 20
    """Size of the file."""
    pixels: int = 1 << 25
    """Pixels of all frames together: an image of 5792 x 5792, or 64 frames of 544 x 960."""
    aspect: int = 8
    """Longer side of a frame in shorter ones: models fit the shorter one to their frames, and crop the other."""
    frames: int = 512
    seconds: int = 20
    """Time of the decoding, from the start of the process."""
    memory: int = 2 << 30
    """Address space of the process, libraries included."""


def decode(data: bytes, limits: MediaLimits) -> UInt8[np.ndarray, "T H W 3"]:
    """Frames of an image (one) or of a clip, RGB.

    The file's first bytes choose the decoder, among few: FFmpeg's playlists, for example, open further addresses.

    Raises:
        InvalidParameterError: if the file is none of these, damaged, or beyond the limits.
        MissingDependencyError: if Pillow or PyAV is needed and not installed.
    """
    if len(data) > limits.bytes:
        raise InvalidParameterError(f"the file has more than {limits.bytes} bytes")
    picture, container = _format(data)
    frames: list[np.ndarray] = []
    pixels = 0
    try:
        for frame in _pictures(data, picture, limits) if picture else _video(data, container, limits):
            pixels += frame.shape[0] * frame.shape[1]
            if len(frames) == limits.frames:
                raise InvalidParameterError(f"the clip has more than {limits.frames} frames")
            _check_pixels(pixels, limits)
            if frames and frame.shape != frames[0].shape:
                raise InvalidParameterError("the frames of the clip differ in size")
            frames.append(frame)
    except (VeraxError, MemoryError):
        raise
    except Exception as error:  # decoders of a dozen formats raise a dozen kinds
        raise InvalidParameterError(f"the file cannot be decoded: {error}") from error
    if not frames:
        raise InvalidParameterError("the file has no frames")
    return np.stack(frames)


def _format(data: bytes) -> tuple[str, str]:
    """Pillow's name of a picture, or FFmpeg's name of a container, and "" for the other."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP", ""
    for magic, name in ((b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF8", "GIF")):
        if data.startswith(magic):
            return name, ""
    if data[4:8] == b"ftyp":
        return "", "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "", "matroska"
    raise InvalidParameterError("expected a PNG, JPEG, GIF or WebP image, or an MP4 or WebM clip")


def _pictures(data: bytes, name: str, limits: MediaLimits) -> Iterator[np.ndarray]:
    """Frames of an image file, which may be animated."""
    pil, sequence = require_optional("PIL.Image"), require_optional("PIL.ImageSequence")
    with pil.open(io.BytesIO(data), formats=[name]) as opened:
        _check_size(opened.width, opened.height, limits)
        for frame in sequence.Iterator(opened):
            yield read_image(frame)


def _video(data: bytes, container: str, limits: MediaLimits) -> Iterator[np.ndarray]:
    """Frames of a clip's first stream of images."""
    av = require_optional("av")
    with av.open(io.BytesIO(data), format=container, options={"protocol_whitelist": "none"}) as opened:
        if not opened.streams.video:
            raise InvalidParameterError("the clip has no images in it")
        stream = opened.streams.video[0]
        _check_size(stream.width, stream.height, limits)
        for frame in opened.decode(stream):
            _check_size(frame.width, frame.height, limits)
            yield frame.to_ndarray(format="rgb24")


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    _check_pixels(width * height, limits)
    if max(width, height) > limits.aspect * min(width, height):
        raise InvalidParameterError(
            f"frames of {width} x {height}: the longer side is more than {limits.aspect} times the shorter"
        )


def _check_pixels(pixels: int, limits: MediaLimits) -> None:
    if pixels > limits.pixels:
        raise InvalidParameterError(f"the file has more than {limits.pixels} pixels, all frames together")


def main(arguments: list[str], source: BinaryIO, target: BinaryIO) -> None:
    """Decode standard input, and write a line of JSON with shape or error, then the frames."""
    limits = MediaLimits(**json.loads(arguments[0]))
    _limit_process(limits)
    try:
        frames = decode(source.read(limits.bytes + 1), limits)
        answer = {"shape": frames.shape}
    except MemoryError:
        frames, answer = None, {"error": "decoding the file takes too much memory"}
    except VeraxError as error:
        frames, answer = None, {"error": str(error)}
    target.write(json.dumps(answer).encode() + b"\n")
    if frames is not None:
        target.write(frames.data)
    target.flush()


def _limit_process(limits: MediaLimits) -> None:
    """Limit memory, processor time and files of this process, on systems that can. No file can grow beyond 0 bytes."""
    try:
        import resource
    except ImportError:  # Windows
        return
    most = {
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_CPU: limits.seconds,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in most.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer)
