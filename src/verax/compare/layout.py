"""Layouts of one side's arrays in the other's: transposed axes, and merged or split axes.

A layout is found by shapes alone, never by values: an arrangement that makes an error small would hide it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, permutations
from operator import mul

import numpy as np

__all__ = ["Layout", "find_layout"]

MAX_AXES = 6
"""Most axes of an array for which every transposition is tried; beyond, only the usual ones are."""


@dataclass(frozen=True)
class Layout:
    """The arrangement of an array of shape `source` as one of shape `target`: transposed by `axes`, then reshaped.

    Attributes:
        source, target, axes: as above.
        ambiguous: True if another transposition has the same shape, and the usual one was taken.
        broadcast: True if the target repeats the source (NumPy broadcasting), which is not transposed then.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    axes: tuple[int, ...]
    ambiguous: bool = False
    broadcast: bool = False

    @property
    def transposes(self) -> bool:
        """True if numbers change their order."""
        moved = [axis for axis in self.axes if self.source[axis] > 1]
        return moved != sorted(moved)

    @property
    def preserves_axes(self) -> bool:
        """True if no axes are merged or split."""
        source, target = (sorted(size for size in shape if size > 1) for shape in (self.source, self.target))
        return source == target

    def apply(self, x: np.ndarray) -> np.ndarray:
        """`[source]` to `[target]`."""
        if self.broadcast:
            return np.broadcast_to(x, self.target)
        return x.transpose(self.axes).reshape(self.target)

    def invert(self, x: np.ndarray) -> np.ndarray:
        """`[target]` to `[source]`."""
        if self.broadcast:
            padded = (1,) * (x.ndim - len(self.source)) + self.source
            return x[tuple(slice(size) for size in padded)].reshape(self.source)
        return x.reshape([self.source[axis] for axis in self.axes]).transpose(np.argsort(self.axes))

    def __str__(self) -> str:
        """For a reader; empty where nothing is rearranged."""
        if self.source == self.target and not self.transposes:
            return ""
        how = f", axes {self.axes}" if self.transposes else ", broadcast" if self.broadcast else ""
        return f"{list(self.source)} -> {list(self.target)}{how}" + "?" * self.ambiguous


@lru_cache(maxsize=65536)
def find_layout(source: tuple[int, ...], target: tuple[int, ...]) -> Layout | None:
    """The usual arrangement that fits, or None.

    Preferred in this order: as it is; channels last to channels first and back, also those of a clip's pictures; two
    neighbouring axes exchanged (heads and tokens); any other transposition. Axes of one come and go (an extra batch);
    fewer numbers are broadcast.
    """
    if math.prod(source) != math.prod(target):
        padded = (1,) * (len(target) - len(source)) + source
        if len(padded) == len(target) and all(a in (1, b) for a, b in zip(padded, target, strict=True)):
            return Layout(source, target, tuple(range(len(source))), broadcast=True)
        return None
    n = len(source)
    same = tuple(range(n))
    usual = [same]
    if n > 2:
        usual += [(0, n - 1, *range(1, n - 1)), (0, *range(2, n), 1)]
    if n > 4:
        usual += [(0, 1, n - 1, *range(2, n - 1)), (0, 1, *range(3, n), 2)]
    usual += [(*same[:i], i + 1, i, *same[i + 2 :]) for i in range(n - 1)]
    others = permutations(range(n)) if n <= MAX_AXES else ()
    fitting: dict[tuple[int, ...], tuple[int, ...]] = {}
    for axes in (*usual, *others):
        if _fits([source[axis] for axis in axes], target):
            fitting.setdefault(tuple(axis for axis in axes if source[axis] > 1), axes)
            if axes == same:
                break
    if not fitting:
        return None
    return Layout(source, target, next(iter(fitting.values())), ambiguous=len(fitting) > 1)


def _fits(source: list[int], target: tuple[int, ...]) -> bool:
    """True if one shape merges neighbouring axes of the other."""
    a, b = (set(accumulate(shape, mul)) | {1} for shape in (source, target))
    return a <= b or b <= a
