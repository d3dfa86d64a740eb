"""Parametrisation of a test over the instruction-set levels of the machine."""

import pytest

from verax.ops.cpu import library

needs_library = pytest.mark.skipif(not library.available(), reason="the native library is not built")
for_each_level = pytest.mark.parametrize("level", library.levels() or ["none"])
