"""Fingerprint of a checkpoint's weights, by which hosts notice that they have opened different ones."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import BinaryIO

from verax.checkpoint.checkpoint import Checkpoint

__all__ = ["fingerprint"]

SAMPLES = 4
"""Places of a weight at which bytes are read."""

SAMPLE = 1024
"""Bytes that are read at a place. Training changes weights everywhere, so that some of these change too."""


def fingerprint(opened: Checkpoint) -> str:
    """Digest of every weight's name, storage and shape, and of bytes at even distances in it.

    It reads 4 KiB of each weight and takes milliseconds, where a digest of all bytes would read the files a second
    time: hosts that divide a model read different parts of it, so that nothing of all bytes is at hand. Other training,
    another revision and another quantisation are noticed; a change of a few numbers between the samples is not. How
    weights are spread over files makes no difference.

    Args:
        opened: the checkpoint.

    Returns:
        Hexadecimal digits.
    """
    digest = hashlib.sha256()
    files: dict[Path, BinaryIO] = {}
    with contextlib.ExitStack() as stack:
        for name in sorted(opened.names()):
            digest.update(f"{name} {opened.kind(name)} {opened.shape(name)} {opened.size(name)}\n".encode())
            for path, start, end in opened.places(name):
                if path not in files:
                    files[path] = stack.enter_context(path.open("rb", buffering=0))
                last = max(end - SAMPLE, start)
                for i in range(SAMPLES):
                    files[path].seek(start + (last - start) * i // (SAMPLES - 1))
                    digest.update(files[path].read(min(SAMPLE, end - start)))
    return digest.hexdigest()[:16]
