"""One dispatch of a program, as rank 0 sends it."""

from __future__ import annotations

import zlib
from typing import Literal

import msgspec
import numpy as np

from verax.text.step.step import StepShape

__all__ = ["Dispatch", "ProgramName"]

ProgramName = Literal["admit", "adapt", "step", "sample", "extend", "draft"]

COMPRESSED_FROM = 4096
"""Bytes from which a message is compressed: the row of an admitted sequence is padded to the longest context."""


class Dispatch(msgspec.Struct, frozen=True, array_like=True):
    """A program and the arrays that the host gives it. The device state is that which the dispatches before it left.

    Attributes:
        program: `"admit"` fills a slot, `"adapt"` writes an adapter, `"step"` runs a step, `"sample"` samples the step
            before it, `"extend"` puts blocks into tables before drafts, `"draft"` runs a step of the draft model.
        arrays: int32 arrays in the order of the program's arguments, as shapes and bytes.
        shape: the bucket of a step, of either model.
    """

    program: ProgramName
    arrays: tuple[tuple[tuple[int, ...], bytes], ...]
    shape: StepShape | None = None

    @classmethod
    def of(cls, program: ProgramName, *arrays: np.ndarray, shape: StepShape | None = None) -> Dispatch:
        """A dispatch of a program with int32 arrays."""
        return cls(program, tuple((array.shape, array.tobytes()) for array in arrays), shape)

    def unpack(self) -> tuple[np.ndarray, ...]:
        """The arrays."""
        return tuple(np.frombuffer(data, np.int32).reshape(shape) for shape, data in self.arrays)

    def encode(self) -> bytes:
        """The message."""
        message = msgspec.msgpack.encode(self)
        # The numbers of an adapter hardly get smaller.
        compresses = len(message) >= COMPRESSED_FROM and self.program != "adapt"
        return b"z" + zlib.compress(message, 1) if compresses else b"-" + message

    @classmethod
    def decode(cls, message: bytes) -> Dispatch:
        """The dispatch of a message."""
        body = zlib.decompress(message[1:]) if message[:1] == b"z" else message[1:]
        return msgspec.msgpack.decode(body, type=cls)
