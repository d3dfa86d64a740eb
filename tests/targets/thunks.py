"""Launches of a program for an NVIDIA GPU: kernels, command buffers and others, which XLA:GPU calls thunks."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["KERNEL", "PRODUCT", "Thunk", "thunks"]

KERNEL, PRODUCT = "kCustomKernel", "kCublasLtMatmul"
"""Kinds of a kernel that XLA wrote, and of a product by cuBLAS."""

# `021: kWhile         [prev=000 (1) | ...] name grid: ...`; what a thunk holds is indented and follows.
_THUNK = re.compile(r"(?P<indent> *)\d+: (?P<kind>k\w+) +\[[^\]]*\] *(?P<name>\w*)")


class Thunk(NamedTuple):
    """A launch by the host, or what holds further ones: a command buffer, a loop, a choice.

    Attributes:
        kind: XLA's name of its kind.
        name: name of the kernel; empty for another kind.
        inner: thunks in it, at any depth.
    """

    kind: str
    name: str
    inner: list[Thunk]


def thunks(compile_with: Callable[[Mapping[str, str]], Any]) -> list[Thunk]:
    """Thunks of a program in the order of their launch, after XLA has put kernels into command buffers.

    Args:
        compile_with: compilation of the program, with further XLA options.
    """
    with tempfile.TemporaryDirectory() as folder:
        compile_with({"xla_dump_to": folder})
        (path,) = Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
        text = path.read_text()
    found: list[Thunk] = []
    for line in text.splitlines():
        if one := _THUNK.match(line):
            place = found[-1].inner if one["indent"] else found
            place.append(Thunk(one["kind"], one["name"], []))
    return found
