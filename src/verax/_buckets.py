"""Short lists of sizes to compile for, since XLA's programs have fixed shapes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

__all__ = ["at_least", "powers"]


def powers(first: int, last: int, factor: int) -> list[int]:
    """Sizes `first`, `first * factor`, ... below `last`, and `last` itself."""
    sizes = [first]
    while sizes[-1] * factor < last:
        sizes.append(sizes[-1] * factor)
    return sizes if sizes[-1] >= last else [*sizes, last]


def at_least(sizes: Sequence[int], wanted: int) -> int:
    """Smallest of the ascending sizes that is at least `wanted`."""
    return sizes[bisect.bisect_left(sizes, wanted)]
