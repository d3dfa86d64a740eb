"""A file of weights, memory-mapped: views of its bytes, and their memory given back when they have been read."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from verax.errors import CheckpointError

__all__ = ["MappedFile"]

_WINDOW = 2 * 1024 * 1024
"""The most that Linux maps around a page that is touched: a huge page of the file cache; 64 KiB on older systems."""


class MappedFile:
    """An open file. Views stay valid while they are referenced; releasing pages only gives memory back."""

    def __init__(self, path: Path):
        """Map the file.

        Raises:
            CheckpointError: if it is missing, empty or unreadable.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if not self.size:
                    raise self.fault("it has 0 bytes, too few for weights")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error

    def view(self, start: int, end: int) -> np.ndarray:
        """A read-only view of the bytes from `start` to `end`."""
        return np.frombuffer(self.map, np.uint8, end - start, start)

    def release_pages(self, start: int, end: int) -> None:
        """Drop a range's pages from memory. No view loses anything: a page that is touched again is mapped again."""
        # A window more on either side: reading the range mapped its neighbours too, which outweigh a small tensor.
        first = max(start - _WINDOW, 0) // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(end + _WINDOW, self.size)
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def fault(self, what: str) -> CheckpointError:
        """The error for content that cannot be right."""
        return CheckpointError(f"{self.path}: {what}; the file is damaged or incomplete, fetch it again")
