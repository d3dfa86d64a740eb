"""Traces: the results of each module of a run, by name and in the order of the run; and what records them."""

from __future__ import annotations

import contextlib
import contextvars
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from verax.errors import CheckpointError, InvalidParameterError
from verax.files import write_text

__all__ = ["OUTPUT", "Entry", "Recorder", "Trace", "Watch", "recording", "split_call", "tap"]

OUTPUT = "(output)"
"""Name of the output of the whole call."""

INDEX = "trace.json"
"""Written last: a folder without it holds no whole trace."""


@dataclass(frozen=True)
class Entry:
    """Description of a stored array. `dtype` is NumPy's name, or bfloat16."""

    shape: tuple[int, ...]
    dtype: str
    number: int
    """Place in the trace, from 0, which is also the name of its file."""


class Trace:
    """An ordered map from names to arrays.

    A name is a module's path, as its key in the checkpoint: `blocks.3.self_attn.q`. A module that runs again is
    `blocks.3.self_attn.q#2`. A module's input, where it is recorded, is `blocks.3.self_attn.input`.
    """

    def __init__(self, folder: str | Path | None = None):
        """Start an empty trace.

        Args:
            folder: folder to stream arrays to, one .npy file each, so that memory holds one at a time; None keeps them.

        Raises:
            InvalidParameterError: if the folder has files in it.
        """
        self.folder = None if folder is None else Path(folder)
        self.entries: dict[str, Entry] = {}
        self._kept: dict[str, np.ndarray] = {}
        self._calls: dict[str, int] = {}
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise InvalidParameterError(f"folder: {self.folder} is not empty; a trace needs a folder of its own")

    @classmethod
    def open(cls, folder: str | Path) -> Trace:
        """Open a trace that `save` finished.

        Raises:
            CheckpointError: if the folder has no finished trace.
        """
        trace, path = cls(), Path(folder) / INDEX
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: no trace here, or an unfinished one: {error}") from error
        trace.folder = Path(folder)
        trace.entries = {
            name: Entry(tuple(entry["shape"]), entry["dtype"], entry["number"]) for name, entry in entries.items()
        }
        return trace

    def add(self, path: str, array: np.ndarray) -> str:
        """Append an array, which is copied; return its name in the trace."""
        call = self._calls[path] = self._calls.get(path, 0) + 1
        name = path if call == 1 else f"{path}#{call}"
        self.entries[name] = Entry(array.shape, array.dtype.name, len(self.entries))
        if self.folder is None:
            self._kept[name] = np.array(array)
        else:
            # NumPy's files know no bfloat16.
            plain = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
            np.save(self._file(name), plain, allow_pickle=False)
        return name

    def save(self) -> None:
        """Finish a trace that is streamed to a folder, so that `Trace.open` finds it."""
        if self.folder is not None:
            text = json.dumps({name: asdict(entry) for name, entry in self.entries.items()}, indent=1)
            write_text(self.folder / INDEX, text)

    def __getitem__(self, name: str) -> np.ndarray:
        """An array, mapped rather than read where it lies in a file.

        Raises:
            KeyError: for a name that the trace does not have.
        """
        entry = self.entries[name]
        if self.folder is None:
            return self._kept[name]
        # Mapped files have no scalars.
        array = np.load(self._file(name), mmap_mode="r" if entry.shape else None, allow_pickle=False)
        return array.view(ml_dtypes.bfloat16) if entry.dtype == "bfloat16" else array

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.entries[name].number:06d}.npy"


def split_call(name: str) -> tuple[str, int]:
    """A name's path and which call of it that is, from 1: `"mlp#2"` is `("mlp", 2)`."""
    path, _, call = name.partition("#")
    return path, int(call or 1)


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
    inputs: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    axes: tuple[int, ...] | None = None
    where: str = ""


class Recorder:
    """Keeps values under the path of the module that is running.

    `record` is a side's own: it puts a value into the trace and returns the value with which the run continues.
    """

    def __init__(self, trace: Trace, record: Value, inputs: Iterable[str] = ()):
        self.trace = trace
        self.path = ""
        self._record = record
        self._inputs = [re.compile(pattern) for pattern in inputs]
        self._turns: dict[tuple[int, str], int] = {}

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
