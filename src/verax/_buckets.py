"""Short lists of sizes to compile for, since XLA's programs have fixed shapes."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence


def powers(first: int, last: int, factor: int) -> list[int]:
    """Sizes `first`, `first * factor`, ... below `last`, and `last` itself."""
    sizes = [first]
    while sizes[-1] * factor < last:
        sizes.append(sizes[-1] * factor)
    return sizes if sizes[-1] >= last else [*sizes, last]


def eighths(first: int, last: int) -> list[int]:
    """Sizes from `first` to the first that is at least `last`, each past the one before by an eighth or less.

    The steps are multiples of 8, which are more than an eighth below 64. A list to a smaller `last` begins as this one.
    """
    sizes = [first]
    while sizes[-1] < last:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(8, octave // 8))
    return sizes


def at_least(sizes: Sequence[int], wanted: int) -> int:
    """Smallest of the ascending sizes that is at least `wanted`."""
    return sizes[bisect.bisect_left(sizes, wanted)]


def cheapest_part(sizes: Sequence[int], wanted: int, overhead: int) -> int:
    """Part of `wanted` to take now, the rest later, in the least time: all of it, or as much as fills a size.

    A part costs its size and the overhead. Taking all at once pads up to the next size; taking the size below leaves a
    rest, for which the same choice is made again. The cheaper of the two wins, and results are kept by their arguments.

    `sizes`: ascending sizes, the last of them at least `wanted`. `wanted`: items in all, 1 or more. `overhead`: cost of
    a part in addition to its size.
    """
    return _cheapest(tuple(sizes), wanted, overhead)[1]


@functools.lru_cache(maxsize=4096)
def _cheapest(sizes: tuple[int, ...], wanted: int, overhead: int) -> tuple[int, int]:
    """Least cost of `wanted` items, and the part to take first."""
    at = bisect.bisect_left(sizes, wanted)
    whole = overhead + sizes[at], wanted
    if at == 0:
        return whole
    below = sizes[at - 1]
    parts = overhead + below + _cheapest(sizes, wanted - below, overhead)[0], below
    return parts if parts[0] < whole[0] else whole
