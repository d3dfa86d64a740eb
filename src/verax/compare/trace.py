"""Traces: the outputs of each module of a run, by name and in the order of the run; and what records them.

An output is a structure (tuples, lists, mappings, dataclasses), and each of its leaves is an array of its own in a
trace: `leaves` gives their paths, which follow the module's, as in `head[1]` or `(output)[logits]`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 and its like by name once it is imported)
import numpy as np

from verax.errors import InvalidParameterError

OUTPUT = "(output)"
"""Name of the output of the whole call."""

TEXT = "text"
"""`Entry.dtype` of a text."""

OBJECT = "object"
"""`Entry.dtype` of a leaf that is neither an array nor a number or text: nothing compares it."""


@dataclass(frozen=True)
class Entry:
    """Description of a stored array. `dtype` is NumPy's name, a name of ml_dtypes, `"text"` or `"object"`."""

    shape: tuple[int, ...]
    dtype: str
    number: int
    """Place in the trace, from 0, which is also the name of its file."""


class Trace:
    """An ordered map from names to arrays.

    A name is a module's path, as its key in the checkpoint: `blocks.3.self_attn.q`. The leaves of a structure have
    their own paths after it: `blocks.3.self_attn[1]`. A module that runs again is `blocks.3.self_attn.q#2`. A module's
    input, where it is recorded, is `blocks.3.self_attn.input`.
    """

    def __init__(self, folder: str | Path | None = None):
        """Start an empty trace.

        Args:
            folder: folder to stream arrays to, one .npy file each, so that memory holds one at a time; None keeps them
                in memory.

        Raises:
            InvalidParameterError: if the folder has files in it.
        """
        self.folder = None if folder is None else Path(folder)
        self.entries: dict[str, Entry] = {}
        self.left_out: list[str] = []
        self._kept: dict[str, np.ndarray] = {}
        self._calls: dict[str, int] = {}
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise InvalidParameterError(f"folder: {self.folder} is not empty; a trace needs a folder of its own")

    def add(self, path: str, value: Any) -> str:
        """Append an array, number or text, which is copied; of another object its type. Return its name."""
        call = self._calls[path] = self._calls.get(path, 0) + 1
        name = path if call == 1 else f"{path}#{call}"
        known = isinstance(value, np.ndarray | np.generic | int | float | complex | str | bytes)
        array = np.array(value if known else type(value).__qualname__)
        dtype = OBJECT if not known else TEXT if array.dtype.kind in "US" else array.dtype.name
        self.entries[name] = Entry(array.shape, dtype, len(self.entries))
        if self.folder is None:
            self._kept[name] = array
        else:
            # NumPy's files know no bfloat16 nor the other dtypes of ml_dtypes.
            plain = array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array
            np.save(self._file(name), plain, allow_pickle=False)
        return name

    def __getitem__(self, name: str) -> np.ndarray:
        """An array, mapped rather than read where it lies in a file.

        Raises:
            KeyError: for a name that the trace does not have.
        """
        entry = self.entries[name]
        if self.folder is None:
            return self._kept[name]
        # Mapped files have no scalars, and are not empty.
        mapped = entry.shape and 0 not in entry.shape
        array = np.load(self._file(name), mmap_mode="r" if mapped else None, allow_pickle=False)
        return array if entry.dtype in (TEXT, OBJECT, array.dtype.name) else array.view(entry.dtype)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.entries[name].number:06d}.npy"

    def first_difference(self, other: Trace) -> str | None:
        """Name of the first array that another run of the same model does not have bit for bit; None if it has all."""

        def equal(name: str) -> bool:
            if name not in other:
                return False
            a, b = self[name], other[name]
            return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()

        return next((name for name in (*self, *other) if name not in self or not equal(name)), None)


def leaves(x: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of an output with their paths, in order: of `(a, {"b": c})` these are `[0]` and `[1][b]`.

    Tuples, lists, mappings (the outputs of transformers are some) and dataclasses are structures. None is not a leaf.
    """
    if x is None:
        return
    if isinstance(x, Mapping):
        members: Iterable[tuple[Any, Any]] = x.items()
    elif isinstance(x, tuple) and (fields := getattr(x, "_fields", None)):
        members = zip(fields, x, strict=True)
    elif isinstance(x, tuple | list):
        members = enumerate(x)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        members = ((member.name, getattr(x, member.name)) for member in dataclasses.fields(x))
    else:
        yield path, x
        return
    for name, member in members:
        yield from leaves(member, f"{path}[{name}]")


def split_leaf(path: str) -> tuple[str, str]:
    """The module's path and the leaf's: `"mlp[0][a]"` is `("mlp", "[0][a]")`."""
    module, bracket, leaf = path.partition("[")
    return module, bracket + leaf


def split_call(name: str) -> tuple[str, int]:
    """A name's path and which call of it that is, from 1: `"mlp#2"` is `("mlp", 2)`."""
    path, _, call = name.rpartition("#")
    return (path, int(call)) if path and call.isdigit() else (name, 1)


T = TypeVar("T")
Value = Callable[[str, Any, Sequence[int] | None], Any]

_active: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("verax_recorder", default=None)


def tap(name: str, x: T) -> T:
    """Name a value inside a function, so that a trace has it; `x` itself is returned.

    Outside of a trace it does nothing. In a module's call the name follows the module's path. With `--inject` or
    `replace=` what is returned is the other side's value.

    Examples:
        >>> q = tap("rotary_q", rotate(q, angles))
    """
    recorder = _active.get()
    return x if recorder is None else recorder.value(name, x)


@dataclass(frozen=True)
class Watch:
    """A function to record as if it were a module of the one that calls it.

    Attributes:
        owner: module, class or dict in which callers find the function.
        attribute: name of the function, or key, in the owner.
        outputs: names of the results: of a tuple's members, or else of one call after the other in a module's call.
        inputs: names for arguments, by their positions.
        axes: transposition of recorded arrays before they are kept.
        where: pattern that is searched in the calling module's path; elsewhere nothing is recorded.
    """

    owner: Any
    attribute: str
    outputs: tuple[str, ...] = ()
    inputs: Mapping[int, str] = field(default_factory=dict)
    axes: tuple[int, ...] | None = None
    where: str = ""


class Recorder:
    """Keeps values under the path of the module that is running.

    `record` is a side's own: it puts a value's leaves into a trace and returns the value that the run continues with.
    """

    def __init__(self, trace: Trace, record: Value, *, inputs: Sequence[str] = (), without: Sequence[str] = ()):
        self.path = ""
        self._trace = trace
        self._record = record
        self._inputs, self._without = (list(map(re.compile, patterns)) for patterns in (inputs, without))
        self._turns: dict[tuple[int, str], int] = {}

    def leaves(self, name: str, x: Any) -> Iterator[tuple[str, Any]]:
        """Leaves of `x` with their names, without the ones that the side leaves out."""
        for path, leaf in leaves(x, name):
            if not any(pattern.search(path) for pattern in self._without):
                yield path, leaf
            elif path not in self._trace.left_out:
                self._trace.left_out.append(path)

    def value(self, name: str, x: Any, axes: Sequence[int] | None = None) -> Any:
        """Record `x` under the running module's path and `name` (either may be empty)."""
        return self._record(".".join(filter(None, (self.path, name))), x, axes)

    def wants_input(self) -> bool:
        """True if the running module's input is to be recorded."""
        return any(pattern.search(self.path) for pattern in self._inputs)

    @contextlib.contextmanager
    def module(self, path: str) -> Iterator[None]:
        """Context in which the module of this path runs."""
        outer, self.path = self.path, path
        try:
            yield
        finally:
            self.path = outer

    def watched(self, watch: Watch, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not re.search(watch.where, self.path):
                return function(*args, **kwargs)
            given = list(args)
            for position, name in watch.inputs.items():
                given[position] = self.value(name, given[position], watch.axes)
            result = function(*given, **kwargs)
            if not watch.outputs:
                return result
            if isinstance(result, tuple):
                named = [self.value(n, x, watch.axes) for n, x in zip(watch.outputs, result, strict=False)]
                return (*named, *result[len(named) :])
            key = (id(watch), self.path)
            turn = self._turns[key] = self._turns.get(key, -1) + 1
            return self.value(watch.outputs[turn % len(watch.outputs)], result, watch.axes)

        return call


@contextlib.contextmanager
def recording(recorder: Recorder, watches: Iterable[Watch]) -> Iterator[None]:
    """Context in which taps reach the recorder, and watched functions are replaced by recorded ones."""
    token = _active.set(recorder)
    with contextlib.ExitStack() as stack:
        stack.callback(_active.reset, token)
        for watch in watches:
            stack.enter_context(_replaced(watch.owner, watch.attribute, watch, recorder))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, attribute: str, watch: Watch, recorder: Recorder) -> Iterator[None]:
    is_dict = isinstance(owner, dict)
    original = owner[attribute] if is_dict else getattr(owner, attribute)
    put = owner.__setitem__ if is_dict else lambda name, value: setattr(owner, name, value)
    put(attribute, recorder.watched(watch, original))
    try:
        yield
    finally:
        put(attribute, original)
