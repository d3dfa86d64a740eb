"""Distances between two arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from verax.errors import InvalidParameterError

__all__ = ["Errors", "measure", "noise"]

AT_ONCE = 1 << 20
"""Numbers that are held in float64 at a time."""

_NOISE = {"float64": 4e-16, "float32": 2.4e-7, "float16": 5e-4, "bfloat16": 4e-3}
"""By dtype: the relative error of one layer that rounding alone makes, a few times the unit roundoff's mean."""


class Errors(NamedTuple):
    """The distance of an array from a reference of the same shape.

    Attributes:
        max_abs: the largest absolute difference.
        max_rel: that, divided by the mean absolute value of the reference.
        l2: the norm of the difference divided by the norm of the reference: the relative error of the whole.
        cosine: of the angle between the two.
        finite: True if all numbers of both are finite.
    """

    max_abs: float
    max_rel: float
    l2: float
    cosine: float
    finite: bool


def measure(ours: np.ndarray, reference: np.ndarray) -> Errors:
    """Errors of `ours`, in float64.

    Raises:
        InvalidParameterError: for different shapes, or empty arrays.
    """
    if ours.shape != reference.shape or ours.size == 0:
        raise InvalidParameterError(f"ours: expected shape {list(reference.shape)}, not empty, got {list(ours.shape)}")
    largest = total = difference = square = other = product = 0.0
    finite = True
    for a, b in _pieces(ours, reference):
        finite = finite and bool(np.isfinite(a).all() and np.isfinite(b).all())
        with np.errstate(invalid="ignore", over="ignore"):
            delta = a - b
            largest = max(largest, float(np.max(np.abs(delta))))
            total += float(np.sum(np.abs(b)))
            difference += float(delta @ delta)
            square += float(b @ b)
            other += float(a @ a)
            product += float(a @ b)
    if not finite:
        return Errors(math.nan, math.nan, math.nan, math.nan, False)
    mean = total / ours.size
    return Errors(
        max_abs=largest,
        max_rel=_ratio(largest, mean),
        l2=_ratio(math.sqrt(difference), math.sqrt(square)),
        cosine=product / math.sqrt(square * other) if square and other else float(square == other),
        finite=True,
    )


def noise(*dtypes: str) -> float:
    """The relative error that rounding alone makes in a layer, at the lowest of these precisions."""
    return max(_NOISE.get(dtype, _NOISE["float32"]) for dtype in dtypes)


def _ratio(error: float, size: float) -> float:
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def _pieces(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    a, b = a.reshape(-1), b.reshape(-1)
    for begin in range(0, a.size, AT_ONCE):
        piece = slice(begin, begin + AT_ONCE)
        yield a[piece].astype(np.float64), b[piece].astype(np.float64)
