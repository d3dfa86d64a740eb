"""Parametrisation of a test over the instruction-set levels of the machine."""

import contextlib

import pytest

from verax.ops.cpu import library

needs_library = pytest.mark.skipif(not library.available(), reason="the native library is not built")
for_each_level = pytest.mark.parametrize("level", library.levels() or ["none"])

NATIVE = [f"native {level}" for level in library.levels()]
"""C++ implementations by level, among the names of an operation's other implementations."""


def at_level(by):
    """An implementation's name, and a context of the level that may follow it: one program serves all levels."""
    implementation, _, level = by.partition(" ")
    return implementation, library.use_level(level) if level else contextlib.nullcontext()
