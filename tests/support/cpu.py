"""Parametrisation of a test over the instruction-set levels of the machine."""

import pytest

from verax.ops.cpu import library

needs_library = pytest.mark.skipif(not library.available(), reason="the native library is not built")
_LEVELS = library.levels() or ["none"]
"""Levels that this machine runs, best first."""

for_each_level = pytest.mark.parametrize(
    "level",
    [pytest.param(level, marks=() if level in (_LEVELS[0], _LEVELS[-1]) else pytest.mark.slow) for level in _LEVELS],
)
"""Parametrisation over the levels; those between the best and the portable one are slow."""
