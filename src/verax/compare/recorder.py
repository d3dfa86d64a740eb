"""Recording that both sides of a comparison share: a recorder of values by module path, taps, and watched functions."""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from verax.compare.trace import Trace

__all__ = ["Recorder", "Watch", "recording", "tap"]

T = TypeVar("T")
Value = Callable[[str, Any, Sequence[int] | None], Any]

_active: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("verax_recorder", default=None)


def tap(name: str, x: T) -> T:
    """Name a value inside a function, so that a trace has it; `x` itself is returned.

    Outside of a trace it does nothing. In a module's call the name stands behind the module's path. With `--inject` or
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
        owner: the module, class or dict that callers find it in.
        attribute: its name, or key, there.
        outputs: names for what it gives: of a tuple, its members; else of one call after the other in a module's call.
        inputs: names for arguments, by their positions.
        axes: how recorded arrays are transposed before they are kept.
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

    `record` is a side's own: it puts a value into the trace and gives what the run is to go on with.
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
        """While a module runs."""
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
    """While a side runs: taps reach the recorder, and watched functions are replaced by recorded ones."""
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
