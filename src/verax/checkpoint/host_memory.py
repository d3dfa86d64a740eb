"""Where weights lie in host memory: aligned so that a CPU device takes them as they are, and in large pages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["HostMemory"]

ALIGNMENT = 64
"""Bytes; what XLA asks of memory that it does not allocate itself, where it would copy once more."""

LARGE_PAGE = 1 << 21
"""Bytes, on x86-64 and most of ARM's Linux."""

CHUNK = 32 * LARGE_PAGE


class HostMemory:
    """Hands out arrays side by side from chunks of large pages, which each by itself would get in part or not at all.

    A product reads its weight as fast as it comes from memory, and every small page holds that up. A chunk is given
    back when the last of its arrays is gone.
    """

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An uninitialised array."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _large_pages(max(size, CHUNK)), 0
        at = self._used
        self._used = -(-(at + size) // ALIGNMENT) * ALIGNMENT
        return self._chunk[at : at + size].view(dtype).reshape(shape)

    def copy(self, array: Any, dtype: np.dtype[Any]) -> np.ndarray:
        """The values of `array` as `dtype`."""
        copy = self.empty(array.shape, dtype)
        copy[...] = array
        return copy


def _large_pages(size: int) -> np.ndarray:
    """`size` bytes that begin at a large page. NumPy asks Linux for them, which takes a page when it is written to."""
    memory = np.empty(size + LARGE_PAGE, np.uint8)
    begin = -memory.ctypes.data % LARGE_PAGE
    return memory[begin : begin + size]
