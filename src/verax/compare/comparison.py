"""The result of a comparison: errors by layer, and a verdict; and the distances between two arrays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from verax.compare.align import Alignment, Pair
from verax.compare.outputs import LogitsComparison, VectorsComparison, ratio
from verax.compare.trace import OBJECT, OUTPUT, TEXT, Trace
from verax.errors import InvalidParameterError
from verax.files import json_value

MAX_REL = 1e-4
"""Bound on the relative L2 error of every layer in float32, where none is given."""

MAX_RATIO = 1.1
"""Bound on the error ratio of the output at a lower precision."""

JUMP = 8.0
"""Factor by which an error stands out: from errors of all layers before it, since rounding grows by less per layer; a
row's or a channel's from the whole array's, since rounding is spread more evenly."""

LEAVE_OUT = "Side(..., without=...) leaves out what cannot be compared"

MOST_PROBLEMS = 8
"""Largest number of arrays whose problems are listed one by one."""

ENOUGH = 8
"""Number of layers from which their own errors show what is usual, in addition to what rounding makes."""


class Origin(NamedTuple):
    """Where the first NaN or infinity of a side arose.

    `operation`: the operation that made it of finite numbers, with its module; or what it was given.
    """

    layer: str
    operation: str

    def __str__(self) -> str:
        return f"in layer {self.layer}, from {self.operation}"


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
        worst_against_truth: the same of the worst row or channel of each.
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
    worst_against_truth: tuple[float, float] | None = None

    @property
    def problem(self) -> str | None:
        """Reason why the two arrays are different whatever the bound, by values and dtypes; None if there is none."""
        errors, kinds = self.errors, (kind_of(self.dtype), kind_of(self.reference_dtype))
        if OBJECT in kinds:
            return f"{self.name}: an object that is not an array, a number or a text; {LEAVE_OUT}"
        if kinds[0] != kinds[1]:
            return f"{self.name}: its dtype is {self.dtype}, the reference's {self.reference_dtype}"
        if errors.not_finite:
            return f"{self.name}: {errors.not_finite}"
        if errors.unequal:
            return f"{self.name} ({self.dtype}): {errors.unequal}"
        return None

    @property
    def ratio(self) -> float | None:
        """Our error over the reference's, both against float32. Below 1, ours is the nearer to the truth."""
        if self.against_truth is None:
            return None
        ours, theirs = self.against_truth
        return ours / theirs if theirs else (1.0 if ours == 0 else math.inf)

    @property
    def hidden(self) -> bool:
        """True if a row or channel is further from float32 than rounding and the reference's worst one, below float32.

        Large numbers elsewhere hide it from the ratio.
        """
        if self.worst_against_truth is None:
            return False
        ours, theirs = self.worst_against_truth
        return not ours <= JUMP * max(theirs, noise(self.dtype, self.reference_dtype))


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
    fused: list[Row] = field(default_factory=list)
    """Outputs of our model run as one compiled program with fused operations; empty if it was not run so."""
    runs: dict[str, str | None] = field(default_factory=dict)
    """By side, the first array that a second run did not repeat bit for bit; None if it repeated all."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """By side, where its first NaN or infinity arose."""
    left_out: list[str] = field(default_factory=list)
    """Names of outputs that a side leaves out (`Side.without`)."""
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
    def outputs(self) -> list[Row]:
        """Rows of the whole call's outputs."""
        return [row for row in self.rows if row.name.startswith(OUTPUT)]

    @property
    def output(self) -> Row | None:
        """Row of the whole call's first output."""
        return next(iter(self.outputs), None)

    @property
    def bound(self) -> float | None:
        """Bound on each layer's relative L2 error; None at a lower precision, where the error ratio decides."""
        return self.max_rel if self.max_rel is not None else MAX_REL if self.dtype == "float32" else None

    @property
    def worst_bound(self) -> float:
        """Bound on the error of each row and channel of a layer; infinite where layers have no bound."""
        return math.inf if self.bound is None else JUMP * self.bound

    @property
    def first(self) -> Row | None:
        """The first layer whose error stands out from those before it: where to look."""
        trend = 0.0
        for row in self.rows:
            error, usual = row.errors.l2, noise(row.dtype, row.reference_dtype)
            if row.problem is not None or row.hidden or not row.errors.worst <= self.worst_bound:
                return row
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
        worst = {row.name for row in self.rows if row.own is not None and not row.own.worst <= self.worst_bound}
        stands_out = lambda row, error: not error <= JUMP * max(usual, noise(row.dtype, row.reference_dtype))
        return [row for row, error in own if stands_out(row, error) or row.name in worst]

    @property
    def failures(self) -> list[str]:
        """Reasons why the two sides do not count as equal; empty if they do."""
        reasons = [f"{ours} and {theirs}: {why}" for ours, theirs, why in self.alignment.mismatched]
        if not self.outputs:
            reasons.append("the outputs could not be compared")
        for what, names in (("extra", self.alignment.extra), ("missing", self.alignment.missing)):
            if names:
                side = "ours has, and the reference" if what == "extra" else "the reference has, and ours"
                reasons.append(f"{what} outputs, which {side} has not: {some(names)}; {LEAVE_OUT}")
        fused = [replace(row, name=f"{row.name} as one compiled program") for row in self.fused]
        # Below float32, rounding may choose other experts in a layer.
        judged = [row for row in self.rows if self.bound is not None or row in self.outputs or not row.errors.unequal]
        if problems := [row.problem for row in (*judged, *fused, *self.gradients) if row.problem is not None]:
            reasons += problems[:MOST_PROBLEMS]
            if len(problems) > MOST_PROBLEMS:
                reasons.append(f"{len(problems) - MOST_PROBLEMS} more arrays that are not finite or not equal")
        for what, rows in (("layers", self.rows), ("gradients", self.gradients)):
            measured = [row for row in rows if row.problem is None and self.bound is not None]
            for of, bound, error in (
                ("", self.bound, lambda row: row.errors.l2),
                (" in a row or channel", self.worst_bound, lambda row: row.errors.worst),
            ):
                over = [row for row in measured if not error(row) <= bound]
                measured = [row for row in measured if error(row) <= bound]
                if not over:
                    continue
                worst = max(over, key=error)
                where = [f" {row.errors.worst_at}" * bool(of) for row in (over[0], worst)]
                guessed = [row.name for row in over if row.layout.endswith("?")]
                reasons.append(
                    f"{len(over)} of {len(rows)} {what} have a relative L2 error over {bound:.0e}{of}: the first "
                    f"is {over[0].name}{where[0]} ({error(over[0]):.1e}), the largest {worst.name}{where[1]} "
                    f"({error(worst):.1e})"
                    + (f"; how {guessed[0]} is arranged is a guess: take sizes that differ" if guessed else "")
                )
        for row in (*self.outputs, *fused):
            if row.problem is not None or self.dtype == "float32":
                continue
            if row.ratio is None:
                reasons.append(f"{row.name}: the reference in float32 has no such output to judge it by")
            elif not row.ratio <= MAX_RATIO:
                reasons.append(f"{row.name}: its error against float32 is {row.ratio:.2f} times the reference's")
            elif row.hidden:
                reasons.append(
                    f"{row.name}: the error of a row or channel against float32 ({row.errors.worst_at}) is over "
                    f"{JUMP:.0f} times the reference's worst"
                )
        for row in fused:
            if row.problem is not None or self.bound is None:
                continue
            if not row.errors.l2 <= self.bound:
                reasons.append(f"{row.name} has a relative L2 error of {row.errors.l2:.1e}, over {self.bound:.0e}")
            elif not row.errors.worst <= self.worst_bound:
                reasons.append(
                    f"{row.name} {row.errors.worst_at} has a relative L2 error of {row.errors.worst:.1e}, over "
                    f"{self.worst_bound:.0e}"
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
            return json_value(fields | {"ratio": row.ratio})

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
            "output": None if self.judged is None else json_value(self.judged.to_dict()),
            "compared": {"outputs": len(self.outputs), "layers": len(self.rows) - len(self.outputs)},
            "rows": list(map(row, self.rows)),
            "fused": list(map(row, self.fused)),
            "deterministic": {side: name is None for side, name in self.runs.items()},
            "not_repeated": {side: name for side, name in self.runs.items() if name is not None},
            "not_finite": {side: origin._asdict() for side, origin in self.origins.items()},
            "gradients": list(map(row, self.gradients)),
            "guessed": [str(pair) for pair in self.guessed],
            **{
                name: getattr(self.alignment, name)
                for name in ("mismatched", "missing", "extra", "ours_only", "reference_only", "unused")
            },
            "left_out": self.left_out,
        }


def measure_rows(
    pairs: Sequence[Pair], ours: Trace, reference: Trace, truth: Trace | None = None, own: Trace | None = None
) -> list[Row]:
    """A row for each pair. `own`: trace of ours with each layer on the reference's activations."""
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
            sides = measure(mine, exact), measure(other, exact)
            row.against_truth, row.worst_against_truth = (sides[0].l2, sides[1].l2), (sides[0].worst, sides[1].worst)
        if own is not None and all(name in own for name in pair.ours):
            row.own = measure(pair.load(own, reference)[0], other)
        rows.append(row)
    return rows


def some(names: Sequence[str], most: int = 6) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


AT_ONCE = 1 << 20
"""Numbers that are held in float64 at a time; more if a row has more."""

SMALL = 1e-4
"""Fraction of the largest row, and of the largest channel, that each one's norm counts for at least.

At the usual bound this is 8e-8 of the largest, which rounding in float32 adds to all others where they mix, as in a
spectrum.
"""

_NOISE = {"float64": 4e-16, "float32": 2.4e-7, "float16": 5e-4, "bfloat16": 4e-3}
"""Relative error of a layer from rounding alone, by dtype: a few times the mean of the unit roundoff."""


class Errors(NamedTuple):
    """The distance of an array from a reference of the same shape. The numbers are NaN where a side is not finite.

    Attributes:
        max_rel: `max_abs` divided by the mean absolute value of the reference.
        l2: the norm of the difference divided by the norm of the reference: the relative error of the whole.
        not_finite: the first NaN or infinity of each side in words; empty if all numbers are finite.
        unequal: the number of differences between integers, booleans or texts in words, and the first; empty for
            floats, and if there is none.
        worst: the largest relative L2 error of a row or a channel, so that large numbers elsewhere do not hide it. A
            row is a vector of the last axis (a token), or a number of a one-dimensional array; a channel is an index
            of the last axis. Norms count for at least the median norm, and `SMALL` of the largest.
        worst_at: the place of that row or channel.
    """

    max_abs: float
    max_rel: float
    l2: float
    cosine: float
    not_finite: str = ""
    unequal: str = ""
    worst: float = 0.0
    worst_at: str = ""


def measure(ours: np.ndarray, reference: np.ndarray) -> Errors:
    """Errors of `ours`, in float64.

    Integers, booleans and texts are compared exactly. Two empty arrays are equal.
    """
    if ours.shape != reference.shape:
        raise InvalidParameterError(f"ours: expected shape {list(reference.shape)}, got {list(ours.shape)}")
    kinds = [TEXT if side.dtype.kind in "US" else kind_of(side.dtype.name) for side in (ours, reference)]
    unequal = ""
    if kinds[0] == kinds[1] not in ("float", "complex"):
        different = ours != reference
        if count := np.count_nonzero(different):
            at = _first_index(different)
            unequal = (
                f"{count} of {ours.size} differ, the first at {list(at)}: {ours[at]}, the reference {reference[at]}"
            )
    if TEXT in kinds or OBJECT in kinds:
        apart = float(kinds[0] != kinds[1] or bool(unequal))
        return Errors(apart, apart, apart, 1 - apart, unequal=unequal)
    largest = total = difference = square = other = product = 0.0
    finite = True
    norms: list[tuple[np.ndarray, np.ndarray]] = []
    for a, b in _pieces(ours, reference):
        finite = finite and bool(np.isfinite(a).all() and np.isfinite(b).all())
        with np.errstate(invalid="ignore", over="ignore"):
            delta = a - b
            largest = max(largest, float(np.max(np.abs(delta))))
            total += float(np.sum(np.abs(b)))
            norms.append((_norms(delta, 1), _norms(b, 1)))
            difference += float(np.vdot(delta, delta))
            square += float(np.vdot(b, b))
            other += float(np.vdot(a, a))
            product += float(np.vdot(a, b))
    if not finite:
        sides = (("ours", ours), ("the reference", reference))
        found = [f"{side} has {where}" for side, array in sides if (where := not_finite(array))]
        return Errors(*[math.nan] * 4, not_finite="; ".join(found))
    with np.errstate(invalid="ignore", over="ignore"):
        worst, worst_at = _worst(ours, reference, norms) if largest else (0.0, "")
    return Errors(
        max_abs=largest,
        max_rel=ratio(largest, total / ours.size if ours.size else 0.0),
        l2=ratio(math.sqrt(difference), math.sqrt(square)),
        cosine=product / math.sqrt(square * other) if square and other else float(square == other),
        unequal=unequal,
        worst=worst,
        worst_at=worst_at,
    )


def _worst(
    ours: np.ndarray, reference: np.ndarray, norms: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[float, str]:
    """The largest relative error of a row or a channel, and its place.

    `norms`: norms of the rows' differences and of the reference's rows, by piece. Channels are measured with each row
    divided by its norm, or one large row would hide all others of a channel.
    """
    differences, sizes = (np.concatenate(side) for side in zip(*norms, strict=True))
    scales = _scales(sizes)
    rows = differences / scales
    squares: Any = np.zeros((2, 1))
    begin = 0
    for a, b in _pieces(ours, reference):
        scale = scales[begin : (begin := begin + len(a)), None]
        squares = squares + np.square([_norms((a - b) / scale, 0), _norms(b / scale, 0)])
    channels = np.sqrt(squares[0]) / _scales(np.sqrt(squares[1]))
    if reference.ndim > 1 and channels.max() > rows.max():
        parts = len(channels) // reference.shape[-1]  # 2 of complex numbers
        return float(channels.max()), f"in channel {int(np.argmax(channels)) // parts}"
    at = np.unravel_index(np.argmax(rows), reference.shape[:-1] if reference.ndim > 1 else reference.shape or (1,))
    return float(rows.max()), f"at {list(map(int, at))}"


def _norms(x: np.ndarray, axis: int) -> np.ndarray:
    return np.sqrt(np.square(x).sum(axis))


def _scales(norms: np.ndarray) -> np.ndarray:
    """Norms that errors of rows or channels are divided by; 1 if all are 0."""
    present = norms[norms > 0]
    if not len(present):
        return np.ones_like(norms)
    return np.maximum(norms, max(np.quantile(present, 0.5, method="lower"), SMALL * present.max()))


def not_finite(array: np.ndarray) -> str:
    """The number of NaN and infinities of an array in words, and the place of the first; empty if there are none."""
    if array.dtype.kind in "USO" or kind_of(array.dtype.name) not in ("float", "complex") or np.isfinite(array).all():
        return ""
    nan, infinite = np.isnan(array), np.isinf(array)
    counts = [f"{n} {what}" for n, what in ((nan.sum(), "NaN"), (infinite.sum(), "infinities")) if n]
    at = _first_index(nan | infinite)
    return f"{' and '.join(counts)} of {array.size} numbers, the first ({array[at]}) at {list(at)}"


def kind_of(dtype: str) -> str:
    """Kind of an entry's dtype: float, complex, integer, boolean, text, or object."""
    kinds = {"float": jnp.floating, "complex": jnp.complexfloating, "integer": jnp.integer, "boolean": jnp.bool_}
    if dtype in (TEXT, OBJECT):
        return dtype
    return next((kind for kind, of in kinds.items() if jnp.issubdtype(np.dtype(dtype), of)), OBJECT)


def _first_index(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(np.argmax(mask), mask.shape)))


def noise(*dtypes: str) -> float:
    """The relative error that rounding alone makes in a layer, at the lowest of these precisions."""
    return max(_NOISE.get(dtype, _NOISE["float32"]) for dtype in dtypes)


def _pieces(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows `[n, D]` of both sides in float64, some at a time; of one-dimensional arrays D is 1."""
    if not a.size:
        return
    size = a.shape[-1] if a.ndim > 1 else 1
    a, b = a.reshape(-1, size), b.reshape(-1, size)
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    count = max(1, AT_ONCE // size)
    for begin in range(0, len(a), count):
        piece = slice(begin, begin + count)
        # The parts of complex numbers are numbers of their own.
        yield a[piece].astype(wide).view(np.float64), b[piece].astype(wide).view(np.float64)
