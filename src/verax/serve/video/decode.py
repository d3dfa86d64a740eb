"""Decoding of images and clips that come from clients, in processes of their own.

`python -m verax.serve.video.decode LIMITS` is the program of such a process: a file on standard input, frames on
standard output. It imports no JAX, opens no file or address, and limits its own memory and time. A decoder that
crashes, hangs or is taken over has one file, no secrets of the server and no weights. Its start costs some tenths of a
second, which is little compared with making a clip.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import math
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import UInt8

from verax._optional import require_optional
from verax.errors import InvalidParameterError, QueueFullError, VeraxError
from verax.video.images import animation_frames, animation_order, even_order, frame_pixels, read_image

_HEADER = re.compile(r"data:[\w.+-]{1,40}/[\w.+-]{1,60}(;[\w.+-]{1,40}=[\w.+-]{1,60})*;base64", re.ASCII)

_LONGEST_HEADER = 200
"""Characters within which the header's comma must be."""


def read_data_uri(uri: str, *, name: str) -> bytes:
    """Contents of a base64 data URI such as `data:image/png;base64,iVBO...`.

    The media type is not read further: the first bytes of the contents decide how they are decoded.
    """
    header = uri[:_LONGEST_HEADER].partition(",")[0]
    if not uri.startswith(f"{header},") or not _HEADER.fullmatch(header):
        raise InvalidParameterError(
            f"{name}: expected a data URI with base64 (data:image/png;base64,...); URLs and paths are not read"
        )
    try:
        return base64.b64decode(uri[len(header) + 1 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameterError(f"{name}: the data URI has no valid base64 after its comma: {error}") from error


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


Timing = tuple[list[int], float | None]
"""Numbers of the frames at even times, known once all are read, and frames per second."""


class Media(NamedTuple):
    """Frames of an image (one) or of a clip, RGB, and frames per second, None if unknown."""

    frames: UInt8[np.ndarray, "T H W 3"]
    fps: float | None


def decode(data: bytes, limits: MediaLimits) -> Media:
    """Decode a file.

    The file's first bytes choose the decoder, among few: FFmpeg's playlists, for example, open further addresses.
    """
    if len(data) > limits.bytes:
        raise InvalidParameterError(f"the file has more than {limits.bytes} bytes")
    picture, container = _format(data)
    frames: list[np.ndarray] = []
    even: list[Timing] = []
    pixels = 0
    try:
        for frame in _pictures(data, picture, limits, even) if picture else _video(data, container, limits, even):
            pixels += frame.shape[0] * frame.shape[1]
            if len(frames) == limits.frames:
                raise InvalidParameterError(f"the clip has more than {limits.frames} frames")
            _check_pixels(pixels, limits)
            if frames and frame.shape != frames[0].shape:
                raise InvalidParameterError("the frames of the clip differ in size")
            frames.append(frame)
        order, fps = even[0]
        if frames:
            _check_pixels(len(order) * frames[0].shape[0] * frames[0].shape[1], limits)
    except (VeraxError, MemoryError):
        raise
    except Exception as error:  # decoders of a dozen formats raise a dozen kinds
        raise InvalidParameterError(f"the file cannot be decoded: {error}") from error
    if not frames:
        raise InvalidParameterError("the file has no frames")
    return Media(np.stack([frames[i] for i in order]), fps)


def _format(data: bytes) -> tuple[str, str]:
    """Pillow's name of a picture, or FFmpeg's name of a container, and "" for the other."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP", ""
    for magic, name in ((b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF8", "GIF")):
        if data.startswith(magic):
            return name, ""
    if data[4:8] == b"ftyp" and re.search(b"avi[fs]", data[8:40]):
        return "AVIF", ""
    if data[4:8] == b"ftyp" and data[8:12] not in _HEIF:
        return "", "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "", "matroska"
    raise InvalidParameterError("expected a PNG, JPEG, GIF, WebP or AVIF image, or an MP4 or WebM clip")


_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")
"""Pictures in the container of MP4, which are tiles that FFmpeg does not put together."""


def _pictures(data: bytes, name: str, limits: MediaLimits, even: list[Timing]) -> Iterator[np.ndarray]:
    """Frames of an image file, which may be animated; `even` gets their timing."""
    with require_optional("PIL.Image").open(io.BytesIO(data), formats=[name]) as opened:
        _check_size(opened.width, opened.height, limits)
        durations = []
        for frame in animation_frames(opened):
            pixels = read_image(frame)
            durations.append(frame.info.get("duration", 0))  # known once the frame is decoded
            yield pixels
        even.append(animation_order(durations, opened.info, name="the file", limit=limits.frames))


def _video(data: bytes, container: str, limits: MediaLimits, even: list[Timing]) -> Iterator[np.ndarray]:
    """Frames of a clip's main stream of images; `even` gets their timing."""
    av = require_optional("av")
    with av.open(io.BytesIO(data), format=container, options={"protocol_whitelist": "none"}) as opened:
        stream = opened.streams.best("video")
        if stream is None:
            raise InvalidParameterError("the clip has no images in it")
        _check_size(stream.width, stream.height, limits)
        times = []
        for frame in opened.decode(stream):
            _check_size(frame.width, frame.height, limits)
            times.append(frame.time)
            yield frame_pixels(frame, stream)
        even.append(even_order(times, float(stream.average_rate) if stream.average_rate else None))


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
        frames, fps = decode(source.read(limits.bytes + 1), limits)
        answer = {"shape": frames.shape, "fps": fps}
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
    bounds = {
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_CPU: limits.seconds,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in bounds.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer)


AT_ONCE = 2
"""Processes at a time. Further files wait."""

MAX_FILES = 16
"""Files that are decoded or wait for it: each is in memory."""

_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "SYSTEMROOT")
"""Variables that the process gets. Keys and tokens of the server are in none of them."""


class MediaDecoder:
    """Decoder of images and clips that runs in other processes."""

    def __init__(self, limits: MediaLimits | None = None):
        self.limits = limits or MediaLimits()
        self.pids: set[int] = set()
        self._files = asyncio.Semaphore(MAX_FILES)
        self._free = asyncio.Semaphore(AT_ONCE)

    async def decode(self, data: bytes, *, name: str) -> Media:
        """Decode a file. The process is killed when its time is over, or the task is cancelled.

        Raises:
            InvalidParameterError: if the file is not an image or clip, is damaged or beyond the limits, or the process
                crashed on it.
            QueueFullError: if too many files wait.
        """
        if not data:
            raise InvalidParameterError(f"{name}: the file is empty")
        if len(data) > self.limits.bytes:
            raise InvalidParameterError(f"{name}: the file has more than {self.limits.bytes} bytes")
        if self._files.locked():
            raise QueueFullError(f"{MAX_FILES} files wait to be decoded, as many as may; try again later")
        async with self._files, self._free:
            status, answer = await self._run(data, name)
        header, _, pixels = answer.partition(b"\n")
        header_fields: dict[str, Any] = (
            json.loads(header) if status == 0 else {"error": f"its decoder ended with {_reason(status)}"}
        )
        if "error" in header_fields:
            raise InvalidParameterError(f"{name}: {header_fields['error']}")
        shape = tuple(header_fields["shape"])
        if math.prod(shape) != len(pixels):
            raise InvalidParameterError(f"{name}: its decoder gave {len(pixels)} bytes for frames of {shape}")
        return Media(np.frombuffer(pixels, np.uint8).reshape(shape), header_fields["fps"])

    async def _run(self, data: bytes, name: str) -> tuple[int, bytes]:
        """Exit status and output of a process that gets `data`."""
        # -P: nothing is imported from the working directory. -B: the process may write no files.
        command = [sys.executable, "-P", "-B", "-m", "verax.serve.video.decode", json.dumps(asdict(self.limits))]
        # Threads of NumPy's matrix products reserve address space, which are not used here.
        environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment |= {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
        )
        self.pids.add(process.pid)
        try:
            async with asyncio.timeout(self.limits.seconds):
                output, _ = await process.communicate(data)
            return await process.wait(), output
        except TimeoutError:
            raise InvalidParameterError(f"{name}: decoding took more than {self.limits.seconds} seconds") from None
        finally:
            self.pids.discard(process.pid)
            if process.returncode is None:
                process.kill()
                await process.wait()


def _reason(status: int) -> str:
    """Description of an exit status: the signal's name where there is one."""
    try:
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    except ValueError:
        return f"status {status}"
