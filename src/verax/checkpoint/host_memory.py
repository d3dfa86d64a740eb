"""Host memory for weights: in large pages, and aligned so that a CPU device uses the arrays without a copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["HostMemory"]

ALIGNMENT = 64
"""Alignment in bytes. XLA copies an array on the host that is aligned to less."""

LARGE_PAGE = 1 << 21
"""Size of a large page in bytes, on x86-64 and on most ARM systems with Linux."""

CHUNK = 32 * LARGE_PAGE
"""Smallest allocation in bytes."""


class HostMemory:
    """Allocator of arrays, which lie side by side in chunks of large pages.

    The speed of a product is limited by the reading of its weight, and small pages slow that reading down. An array
    that is allocated by itself lies in large pages only in part, or not at all. The memory of a chunk is freed with
    the last of its arrays.
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
        """A copy of `array` with the dtype `dtype`."""
        copy = self.empty(array.shape, dtype)
        copy[...] = array
        return copy


def _large_pages(size: int) -> np.ndarray:
    """Uninitialised uint8 array of `size` bytes that begins at the boundary of a large page.

    NumPy requests large pages of Linux for an allocation of this size. A page takes memory from its first write on.
    """
    memory = np.empty(size + LARGE_PAGE, np.uint8)
    begin = -memory.ctypes.data % LARGE_PAGE
    return memory[begin : begin + size]
