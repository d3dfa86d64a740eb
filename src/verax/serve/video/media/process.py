"""Decoding of clients' files in processes of their own, one for each file.

A decoder that crashes, hangs or is taken over has one file, no secrets of the server and no weights. Its start costs
some tenths of a second, which is little beside making a clip.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import UInt8

from verax.errors import InvalidParameterError, QueueFullError
from verax.serve.video.media.decode import MediaLimits

__all__ = ["MediaDecoder"]

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
        """Processes that run now."""
        self._files = 0
        self._free = asyncio.Semaphore(AT_ONCE)

    async def decode(self, data: bytes, *, name: str) -> UInt8[np.ndarray, "T H W 3"]:
        """Frames of a file: one of an image. The process is killed when its time is over, or the task is cancelled.

        Args:
            data: contents of the file.
            name: name of the field in errors.

        Raises:
            InvalidParameterError: if the file is no image or clip, damaged, or beyond the limits, or the process
                crashed on it.
            QueueFullError: if too many files wait.
        """
        if not data:
            raise InvalidParameterError(f"{name}: the file is empty")
        if len(data) > self.limits.bytes:
            raise InvalidParameterError(f"{name}: the file has more than {self.limits.bytes} bytes")
        if self._files >= MAX_FILES:
            raise QueueFullError(f"{MAX_FILES} files wait to be decoded, as many as may; try again later")
        self._files += 1
        try:
            async with self._free:
                status, answer = await self._run(data, name)
        finally:
            self._files -= 1
        header, _, pixels = answer.partition(b"\n")
        found: dict[str, Any] = (
            json.loads(header) if status == 0 else {"error": f"its decoder ended with {_reason(status)}"}
        )
        if "error" in found:
            raise InvalidParameterError(f"{name}: {found['error']}")
        shape = tuple(found["shape"])
        if math.prod(shape) != len(pixels):
            raise InvalidParameterError(f"{name}: its decoder gave {len(pixels)} bytes for frames of {shape}")
        return np.frombuffer(pixels, np.uint8).reshape(shape)

    async def _run(self, data: bytes, name: str) -> tuple[int, bytes]:
        """Exit status and output of a process that gets `data`."""
        # -P: the working directory is no place to import from. -B: the process may write no files.
        command = [sys.executable, "-P", "-B", "-m", "verax.serve.video.media.decode", json.dumps(asdict(self.limits))]
        # Threads of NumPy's matrix products reserve address space, and there are no such products here.
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
