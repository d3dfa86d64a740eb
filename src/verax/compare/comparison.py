"""The result of a comparison: errors by layer, and a verdict; and the distances between two arrays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from verax.compare.align import Alignment, Pair
from verax.compare.outputs import LogitsComparison, VectorsComparison
from verax.compare.trace import OUTPUT, Trace
from verax.errors import InvalidParameterError

__all__ = ["MAX_RATIO", "Comparison", "Errors", "Row", "measure", "measure_rows", "noise"]

MAX_REL = 1e-4
"""Bound on the relative L2 error of every layer in float32, where none is given."""

MAX_RATIO = 1.1
"""Bound on the error ratio of the output at a lower precision."""

JUMP = 8.0
"""Factor by which an error stands out from the errors of all layers before it. Rounding grows by less per layer."""

ENOUGH = 8
"""Number of layers from which their own errors show what is usual, in addition to what rounding makes."""


@dataclass
class Row:
    """Errors of a layer, or of a parameter's gradient.

    Attributes:
        name, reference: names on the two sides.
        dtype, reference_dtype: dtypes on the two sides.
        errors: errors of ours against the reference, errors of earlier layers included.
        layout: arrangement of ours in the reference's shape; empty if it was not rearranged.
        by: way in which the two names were matched.
        own: the layer's own errors, made on the reference's activations; None without `inject`.
        against_truth: relative L2 errors of ours and of the reference against the reference in float32, at a lower
            precision.
    """

    name: str
    reference: str
    dtype: str
    reference_dtype: str
    errors: Errors
    layout: str = ""
    by: str = "name"
    own: Errors | None = None
    against_truth: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        """Our error over the reference's, both against float32. Below 1, ours is the nearer to the truth."""
        if self.against_truth is None:
            return None
        ours, theirs = self.against_truth
        return ours / theirs if theirs else (1.0 if ours == 0 else math.inf)


@dataclass
class Comparison:
    """Rows in the order in which our layers finished, so that what is inside a block stands before it."""

    title: str
    rows: list[Row]
    alignment: Alignment
    dtype: str = "float32"
    max_rel: float | None = None
    """Bound given by the user; None for the usual ones."""
    gradients: list[Row] = field(default_factory=list)
    gradients_only: tuple[list[str], list[str]] = ([], [])
    """Parameters of which only our, or only the reference's, side has a gradient."""
    fused: Row | None = None
    """The output of our model run as one compiled program with fused operations; None if it was not run so."""
    about: dict[str, Any] = field(default_factory=dict)
    """Description of the run, with versions."""
    judged: LogitsComparison | VectorsComparison | None = None
    """Comparison of the two outputs as texts or vectors."""
    peak_memory: int | None = None
    """Most bytes that the process has held up to the end of the comparison; None if the system does not report it."""

    @property
    def guessed(self) -> list[Pair]:
        """Pairs that only shape and order match: `print(*result.guessed)` before the numbers are believed."""
        return self.alignment.guessed

    @property
    def output(self) -> Row | None:
        """Row of the whole call's output."""
        return next((row for row in self.rows if row.name == OUTPUT), None)

    @property
    def bound(self) -> float | None:
        """Bound on each layer's relative L2 error; None at a lower precision, where the error ratio decides."""
        return self.max_rel if self.max_rel is not None else MAX_REL if self.dtype == "float32" else None

    @property
    def first(self) -> Row | None:
        """The first layer whose error stands out from those before it: where to look."""
        trend = 0.0
        for row in self.rows:
            error, usual = row.errors.l2, noise(row.dtype, row.reference_dtype)
            if row.against_truth is not None:
                error, theirs = row.against_truth
                # A layer that the reference keeps in float32 has no error against float32; ours there is rounding.
                if not error <= max(2 * theirs, usual / 2, JUMP * noise("float32")):
                    return row
            elif not error <= JUMP * max(trend, usual):
                return row
            trend = max(trend, error)
        return None

    @property
    def faults(self) -> list[Row]:
        """Layers whose own error stands out; empty without `inject`."""
        own = [(row, row.own.l2) for row in self.rows if row.own is not None]
        finite = [error for _, error in own if math.isfinite(error) and error > 0]
        # A quartile, as a fault may spoil many layers, and of too few nothing is usual.
        usual = statistics.quantiles(finite, n=4)[0] if len(finite) >= ENOUGH else 0.0
        return [row for row, error in own if not error <= JUMP * max(usual, noise(row.dtype, row.reference_dtype))]

    @property
    def failures(self) -> list[str]:
        """Reasons why the two sides do not count as equal; empty if they do."""
        reasons = [f"{ours} and {theirs}: {why}" for ours, theirs, why in self.alignment.mismatched]
        if self.output is None:
            reasons.append("the outputs could not be compared")
        for what, rows in (("layers", self.rows), ("gradients", self.gradients)):
            if self.bound is not None and (over := [row for row in rows if not row.errors.l2 <= self.bound]):
                worst = max(over, key=lambda row: math.inf if math.isnan(row.errors.l2) else row.errors.l2)
                guessed = [row.name for row in over if row.layout.endswith("?")]
                reasons.append(
                    f"{len(over)} of {len(rows)} {what} have a relative L2 error over {self.bound:.0e}: the first is "
                    f"{over[0].name} ({over[0].errors.l2:.1e}), the largest {worst.name} ({worst.errors.l2:.1e})"
                    + (f"; how {guessed[0]} is arranged is a guess: take sizes that differ" if guessed else "")
                )
        for output, kind in ((self.output, ""), (self.fused, " as one compiled program")):
            if output is not None and output.ratio is not None and not output.ratio <= MAX_RATIO:
                reasons.append(f"the output's error{kind} against float32 is {output.ratio:.2f} times the reference's")
        if self.fused is not None and self.bound is not None and not self.fused.errors.l2 <= self.bound:
            reasons.append(
                f"the output as one compiled program has a relative L2 error of {self.fused.errors.l2:.1e}, over "
                f"{self.bound:.0e}"
            )
        if any(self.gradients_only):
            reasons.append(f"gradients on one side only: {', '.join(chain(*self.gradients_only))}")
        return reasons

    @property
    def passed(self) -> bool:
        """True if the two sides count as equal."""
        return not self.failures

    @property
    def dtypes(self) -> dict[tuple[str, str], int]:
        """Number of layers by their dtypes, our side's and the reference's."""
        counts: dict[tuple[str, str], int] = {}
        for row in self.rows:
            key = (row.dtype, row.reference_dtype)
            counts[key] = counts.get(key, 0) + 1
        return counts

    def as_dict(self) -> dict[str, Any]:
        """The comparison, ready for JSON. Infinite and undefined numbers become None."""

        def row(row: Row) -> dict[str, Any]:
            fields = asdict(row) | {"errors": row.errors._asdict(), "own": row.own._asdict() if row.own else None}
            return _plain(fields | {"ratio": row.ratio})

        first = self.first
        return {
            "kind": "comparison",
            "title": self.title,
            "passed": self.passed,
            "failures": self.failures,
            "dtype": self.dtype,
            "max_rel": self.bound,
            "first": first.name if first else None,
            "faults": [row.name for row in self.faults],
            "about": self.about,
            "peak_memory_gb": None if self.peak_memory is None else self.peak_memory / 1e9,
            "output": None if self.judged is None else _plain(self.judged.to_dict()),
            "rows": list(map(row, self.rows)),
            "fused": None if self.fused is None else row(self.fused),
            "gradients": list(map(row, self.gradients)),
            "guessed": [str(pair) for pair in self.guessed],
            "ours_only": self.alignment.ours_only,
            "reference_only": self.alignment.reference_only,
        }


def measure_rows(
    pairs: Sequence[Pair], ours: Trace, reference: Trace, truth: Trace | None = None, own: Trace | None = None
) -> list[Row]:
    """A row for each pair.

    Args:
        pairs: pairs from `align`.
        ours, reference: the traces.
        truth: trace of the reference in float32, with the same names.
        own: trace of ours with each layer on the reference's activations.
    """
    rows = []
    for pair in pairs:
        mine, other = pair.load(ours, reference)
        row = Row(
            name=pair.ours[0],
            reference=" + ".join(pair.reference),
            dtype=ours.entries[pair.ours[0]].dtype,
            reference_dtype=reference.entries[pair.reference[0]].dtype,
            errors=measure(mine, other),
            layout=str(pair.layout),
            by=pair.by,
        )
        if truth is not None and all(name in truth for name in pair.reference):
            exact = pair.load_reference(truth)
            row.against_truth = measure(mine, exact).l2, measure(other, exact).l2
        if own is not None and all(name in own for name in pair.ours):
            row.own = measure(pair.load(own, reference)[0], other)
        rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value


AT_ONCE = 1 << 20
"""Numbers that are held in float64 at a time."""

_NOISE = {"float64": 4e-16, "float32": 2.4e-7, "float16": 5e-4, "bfloat16": 4e-3}
"""Relative error of a layer from rounding alone, by dtype: a few times the mean of the unit roundoff."""


class Errors(NamedTuple):
    """The distance of an array from a reference of the same shape.

    Attributes:
        max_abs: the largest absolute difference.
        max_rel: `max_abs` divided by the mean absolute value of the reference.
        l2: the norm of the difference divided by the norm of the reference: the relative error of the whole.
        cosine: cosine of the angle between the two.
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
