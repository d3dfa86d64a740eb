"""Alignment of two traces: arrays are matched by name, by a table between names, and last by shape and order.

The arrangement of one side's array in the other's shape (`Layout`: axes transposed, merged or split) is found by shapes
alone, never by values: an arrangement that makes an error small would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, permutations
from operator import mul
from typing import Any, Protocol

import numpy as np

from verax.checkpoint.video.parts import Renaming
from verax.compare.trace import OUTPUT, Trace, split_call, split_leaf
from verax.errors import InvalidParameterError


class Table(Protocol):
    """A table between our names and the reference's, such as a `Renaming`."""

    def forward(self, name: str, /) -> tuple[str, ...] | None:
        """The reference's names of our `name`; None if the table does not have it."""
        ...


Names = Table | Mapping[str, str] | Sequence[Table]
"""Names of ours and of the reference: tables, of which the first counts that leads to an existing name; or a dict.

A dict's keys and values are beginnings of our and the reference's names, with `{i}` for a number, as in `Renaming`.
"""


@dataclass(frozen=True)
class Pair:
    """Arrays of both sides that should be equal.

    Attributes:
        ours, reference: names of the arrays: one each, or several on one side, which concatenated are the other's.
        layout: arrangement of ours in the reference's shape.
        by: way in which they were matched: `name`, `table`, or `shape and order`.
    """

    ours: tuple[str, ...]
    reference: tuple[str, ...]
    layout: Layout
    by: str
    axis: int = 0

    def load(self, ours: Trace, reference: Trace) -> tuple[np.ndarray, np.ndarray]:
        """Both arrays, in the reference's arrangement."""
        return self.layout.apply(_together(ours, self.ours, self.axis)), self.load_reference(reference)

    def load_reference(self, reference: Trace) -> np.ndarray:
        """The reference's array."""
        return _together(reference, self.reference, self.axis)

    def __str__(self) -> str:
        shapes = f" ({self.layout})" if str(self.layout) else ""
        return f"{' + '.join(self.ours)} = {' + '.join(self.reference)}{shapes}"


@dataclass
class Alignment:
    """Pairs in the order of our run, and the arrays without a partner."""

    pairs: list[Pair]
    mismatched: list[tuple[str, str, str]] = field(default_factory=list)
    """Names that belong together, and why their arrays cannot be compared."""
    ours_only: list[str] = field(default_factory=list)
    """Names of layers that the reference does not have."""
    reference_only: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Outputs that our side lacks, of the whole or of layers that both have."""
    extra: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Entries of a dict of names that match nothing: no array of ours, or none of the reference's."""

    @property
    def guessed(self) -> list[Pair]:
        """Pairs that are matched by shape and order alone, for a person to confirm."""
        return [pair for pair in self.pairs if pair.by == "shape and order"]


def translator(names: Names | None, there: Container[str]) -> Callable[[str], tuple[tuple[str, ...], str] | None]:
    """A function from our path to the reference's paths, whose arrays are concatenated, and the way of the match.

    `names`: the tables. A path that no table translates may have the same name on both sides.

    Raises:
        InvalidParameterError: if the names are something else.
    """
    given: Any = () if names is None else names if isinstance(names, tuple | list) else (names,)
    tables = [Renaming(list(table.items())) if isinstance(table, Mapping) else table for table in given]
    for table in tables:
        if not hasattr(table, "forward"):
            raise InvalidParameterError(f"names: expected a dict from our names to the reference's, got {table!r}")

    def translate(path: str) -> tuple[tuple[str, ...], str] | None:
        for table in tables:
            paths = table.forward(path)
            if paths is not None and all(name in there for name in paths):
                return paths, "table"
        return ((path,), "name") if path in there else None

    return translate


def unused_names(names: Names | None, ours: Collection[str], there: Container[str]) -> list[str]:
    """Entries of dicts of names, as text, that lead from none of our paths to paths of the reference's."""
    given: Any = names if isinstance(names, tuple | list) else (names,)
    unused = []
    for rule in (rule for table in given if isinstance(table, Mapping) for rule in table.items()):
        found = filter(None, map(Renaming([rule]).forward, ours))
        if not any(all(path in there for path in paths) for paths in found):
            unused.append(f"{rule[0]!r}: {rule[1]!r}")
    return unused


def align(ours: Trace, reference: Trace, names: Names | None = None, *, guess: bool = False) -> Alignment:
    """Match two traces.

    Args:
        names: tables between our names and the reference's, where they differ.
        guess: match the rest by shape, in the order of the two runs.
    """
    calls, theirs = _by_path(ours), _by_path(reference)
    translate = translator(names, theirs)
    pairs_by_name: dict[str, Pair] = {}
    result = Alignment([], unused=unused_names(names, calls, theirs))
    used: set[str] = set()
    for path, own in calls.items():
        if (translated := translate(path)) is None:
            continue
        paths, by = translated
        for leaf, others in _same_leaves(own, [theirs[other] for other in paths]):
            if len(paths) == 1:
                pairs = _of_calls(ours, own[leaf], theirs[paths[0]][others[0]], reference, by)
            else:
                groups = [theirs[other][at] for other, at in zip(paths, others, strict=True)]
                pairs = _of_several(ours, own[leaf], groups, reference, by)
            names_there = [name for other, at in zip(paths, others, strict=True) for name in theirs[other][at]]
            used |= {*own[leaf], *names_there}
            if pairs is None:
                shapes = [
                    " and ".join(str(list(trace.entries[name].shape)) for name in group)
                    for trace, group in ((ours, own[leaf]), (reference, names_there))
                ]
                belong = " + ".join(f"{other}{at}" for other, at in zip(paths, others, strict=True))
                why = f"{shapes[0]} is not an arrangement of {shapes[1]}"
                if path == OUTPUT:
                    why += " that an output may have: only channels move; Side(..., call=...) can transpose it"
                result.mismatched.append((path + leaf, belong, why))
            pairs_by_name |= {pair.ours[-1]: pair for pair in pairs or ()}
    left, rest = ([name for name in trace if name not in used] for trace in (ours, reference))
    result.extra, result.ours_only = _split(left, used)
    result.missing, result.reference_only = _split(rest, used)
    if guess:
        matches = _by_shape(ours, result.ours_only, reference, result.reference_only)
        pairs_by_name |= {mine: Pair((mine,), (other,), layout, "shape and order") for mine, other, layout in matches}
        used = {name for mine, other, _ in matches for name in (mine, other)}
        for outputs, layers in ((result.extra, result.ours_only), (result.missing, result.reference_only)):
            more, layers[:] = _split([name for name in layers if name not in used], used)
            outputs += more
    result.pairs = [pairs_by_name[name] for name in ours if name in pairs_by_name]
    return result


def _split(names: Iterable[str], used: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names of leaves of the output or of modules with a leaf that is `used`, and names of other modules' leaves."""
    modules = {OUTPUT, *(split_leaf(split_call(name)[0])[0] for name in used)}
    of_them: tuple[list[str], list[str]] = ([], [])
    for name in names:
        of_them[split_leaf(split_call(name)[0])[0] not in modules].append(name)
    return of_them


def _by_path(trace: Trace) -> dict[str, dict[str, list[str]]]:
    """Names of the calls of each leaf of each module, by the module's path and the leaf's."""
    paths: dict[str, dict[str, list[str]]] = {}
    for name in trace:
        path, leaf = split_leaf(split_call(name)[0])
        paths.setdefault(path, {}).setdefault(leaf, []).append(name)
    return paths


def _same_leaves(own: Iterable[str], theirs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Leaves of our module that are compared with leaves of the reference's, one of each module.

    Leaves of one path belong together. What is left of two structures is matched in order if one numbers what the other
    names, as a tuple does the fields of a dataclass; a single array is the first of several.
    """
    first = [next(iter(leaves_of)) for leaves_of in theirs]
    mine = list(own)
    if len(theirs) > 1:
        yield mine[0], first
        return
    other = list(theirs[0])
    shared = [leaf for leaf in mine if leaf in other]
    yield from ((leaf, [leaf]) for leaf in shared)
    left, rest = ([leaf for leaf in side if leaf not in shared] for side in (mine, other))
    named = [any(leaf and not leaf[1:].partition("]")[0].isdigit() for leaf in side) for side in (left, rest)]
    is_array = not shared and "" in (*left, *rest)
    if is_array or named[0] != named[1]:
        yield from ((leaf, [at]) for leaf, at in zip(left, rest, strict=False))


def _of_calls(ours: Trace, own: list[str], theirs: list[str], reference: Trace, by: str) -> list[Pair] | None:
    """Pairs of calls in order; or one side's calls, concatenated, with the other's single call."""
    if len(own) == len(theirs):
        pairs = []
        for mine, other in zip(own, theirs, strict=True):
            layout = find_layout(ours.entries[mine].shape, reference.entries[other].shape)
            if layout is None or (mine.startswith(OUTPUT) and not layout.keeps_order):
                return None
            pairs.append(Pair((mine,), (other,), layout, by))
        return pairs
    if len(own) > 1 and len(theirs) > 1:
        return None
    candidates = [
        Pair(tuple(own), tuple(theirs), layout, by, axis)
        for axis, shapes in _joined(ours, own, reference, theirs)
        if (layout := find_layout(*shapes)) and not layout.broadcast
    ]
    # Among several axes, the one that leaves every size unchanged on the other side.
    order = lambda pair: (not pair.layout.preserves_axes, pair.layout.transposes, pair.layout.ambiguous)
    return sorted(candidates, key=order)[:1] or None


def _of_several(ours: Trace, own: list[str], theirs: list[list[str]], reference: Trace, by: str) -> list[Pair] | None:
    """Our one module with several of the reference's, whose results are concatenated along the last axis."""
    if any(len(calls) != len(own) for calls in theirs):
        return None
    pairs = []
    for mine, *others in zip(own, *theirs, strict=True):
        shape = _shape(reference, others, -1)
        layout = None if shape is None else find_layout(ours.entries[mine].shape, shape)
        if layout is None:
            return None
        pairs.append(Pair((mine,), tuple(others), layout, by, -1))
    return pairs


def _joined(
    ours: Trace, own: list[str], reference: Trace, theirs: list[str]
) -> Iterable[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
    many = (ours.entries[own[0]] if len(own) > 1 else reference.entries[theirs[0]]).shape
    for axis in range(len(many)):
        shapes = _shape(ours, own, axis), _shape(reference, theirs, axis)
        if shapes[0] is not None and shapes[1] is not None:
            yield axis, (shapes[0], shapes[1])


def _shape(trace: Trace, names: Sequence[str], axis: int) -> tuple[int, ...] | None:
    """Shape of arrays concatenated along an axis; None if they do not fit."""
    shapes = [trace.entries[name].shape for name in names]
    if len(shapes) == 1:
        return shapes[0]
    others = {(len(shape), *shape[:axis], *shape[axis % len(shape) + 1 :]) for shape in shapes if shape}
    if len(others) != 1 or not all(shapes):
        return None
    whole = list(shapes[0])
    whole[axis] = sum(shape[axis] for shape in shapes)
    return tuple(whole)


def _together(trace: Trace, names: Sequence[str], axis: int) -> np.ndarray:
    return trace[names[0]] if len(names) == 1 else np.concatenate([trace[name] for name in names], axis=axis)


def _by_shape(ours: Trace, left: list[str], reference: Trace, rest: list[str]) -> list[tuple[str, str, Layout]]:
    """The longest common subsequence of two lists, in which arrays are alike if one can be arranged as the other.

    Among equally long ones, that in which most last components of names are equal.
    """
    layouts = [
        [find_layout(ours.entries[mine].shape, reference.entries[other].shape) for other in rest] for mine in left
    ]
    best = np.zeros((len(left) + 1, len(rest) + 1))

    def score(i: int, j: int) -> float:
        same = left[i].rsplit(".", 1)[-1] == rest[j].rsplit(".", 1)[-1]
        return 1 + (0.5 / (1 + min(len(left), len(rest))) if same else 0)

    for i in range(len(left) - 1, -1, -1):
        for j in range(len(rest) - 1, -1, -1):
            best[i, j] = max(best[i + 1, j], best[i, j + 1])
            if layouts[i][j] is not None:
                best[i, j] = max(best[i, j], best[i + 1, j + 1] + score(i, j))
    matches, i, j = [], 0, 0
    while i < len(left) and j < len(rest):
        layout = layouts[i][j]
        if layout is not None and best[i, j] == best[i + 1, j + 1] + score(i, j):
            matches.append((left[i], rest[j], layout))
            i, j = i + 1, j + 1
        elif best[i, j] == best[i + 1, j]:
            i += 1
        else:
            j += 1
    return matches


MAX_AXES = 6
"""Largest number of axes for which every transposition is tried; with more, only the usual ones are."""


@dataclass(frozen=True)
class Layout:
    """The arrangement of an array of shape `source` as one of shape `target`: transposed by `axes`, then reshaped.

    `ambiguous`: True if another transposition has the same shape, and the usual one was taken. `broadcast`: True if the
    target repeats the source (NumPy broadcasting), which is not transposed then.
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
    def keeps_order(self) -> bool:
        """True if no axes change places but for channels, which are last on one side and not on the other.

        They pass all axes of a picture, or the only one of a sequence: one alone is the exchange of height and width.
        """
        last = len(self.axes) - 1
        channels = any(
            last in (place, axis) and abs(place - axis) >= min(2, last - 1) > 0 and rest == sorted(rest)
            for place, axis in enumerate(self.axes)
            for rest in [[*self.axes[:place], *self.axes[place + 1 :]]]
        )
        return not self.broadcast and (channels or not self.transposes)

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
        """Description for a reader; empty where nothing is rearranged."""
        if self.source == self.target and not self.transposes:
            return ""
        how = f", axes {self.axes}" if self.transposes else ", broadcast" if self.broadcast else ""
        return f"{list(self.source)} -> {list(self.target)}{how}" + "?" * self.ambiguous


@lru_cache(maxsize=65536)
def find_layout(source: tuple[int, ...], target: tuple[int, ...]) -> Layout | None:
    """The usual arrangement that fits, or None.

    Preferred in this order: unchanged; channels last to channels first and back, also for the pictures of a clip; two
    neighbouring axes exchanged (heads and tokens); any other transposition. Axes of one come and go (an extra batch);
    fewer numbers are broadcast over other axes than the last.
    """
    if 0 in (*source, *target):
        return Layout(source, target, tuple(range(len(source)))) if source == target else None
    if math.prod(source) != math.prod(target):
        padded = (1,) * (len(target) - len(source)) + source
        repeats = len(padded) == len(target) and all(a in (1, b) for a, b in zip(padded, target, strict=True))
        if repeats and source[-1:] == target[-1:]:
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
