"""Options, each declared once: a field of a dataclass with its default, meaning, range and place on the command line.

`option` declares a field, `check_options` checks an instance, and `options_of` gives the declarations to whatever
derives from them: the HTTP API, the command line and the C++ kernels. The module imports the standard library only,
so that the build of the native library can read a table of options.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from verax.errors import InvalidParameterError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Declaration of an option. `options_of` fills in what the field itself says: name, types and default.

    Attributes:
        doc: its meaning. The first sentence is the help text of its flag.
        above: True if `low` itself is out of range.
        flags: spellings of its flag, if they are not the name with dashes.
        shown: default as `--help` shows it; empty for none.
        envvar: environment variable that the command line reads in place of the flag.
        path: `"file"` or `"folder"` that must exist.
        column: dtype of the column of the device's sampling parameters that holds it, `"float32"` or `"int32"`.
        off: value of that column in rows of greedy decoding; the default if None.
        recommended: True if a checkpoint's generation_config.json may give the default.
        kind: type of a value on the command line: int, float, bool, str or Path; None for other types.
    """

    doc: str
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    panel: str | None = None
    flags: tuple[str, ...] = ()
    shown: str | None = None
    envvar: str | None = None
    path: str | None = None
    column: str | None = None
    off: float | None = None
    recommended: bool = False
    name: str = ""
    kind: type[Any] | None = None
    optional: bool = False
    repeated: bool = False
    default: Any = None

    @property
    def help(self) -> str:
        """First sentence of the documentation."""
        first, separator, _ = self.doc.partition(". ")
        return first + "." if separator else self.doc

    def check(self, value: Any) -> Any:
        """The value, as a plain int or float if it is a number of another library."""
        if (value is None and self.optional) or self.repeated:
            return value
        if self.path and value == "":  # which Path takes for the current folder
            raise InvalidParameterError(f"{self.name}: expected the path of a {self.path}, got an empty text")
        if self.choices and value not in self.choices:
            raise InvalidParameterError(f"{self.name}: expected one of {', '.join(self.choices)}, got {value!r}")
        if self.kind is bool and not isinstance(value, bool):
            raise InvalidParameterError(f"{self.name}: expected True or False, got {value!r}")
        if self.kind not in (int, float):
            return value
        number: Any = value
        whole = self.kind is int
        right, expected = (is_whole(number), "a whole number") if whole else (is_real(number), "a number")
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        if right and low <= number <= high and not (self.above and number == low):
            return int(number) if whole else float(number)
        raise InvalidParameterError(f"{self.name}: expected {expected}{self._range()}, got {value!r}")

    def _range(self) -> str:
        none = ", or None" if self.optional else ""
        if self.kind is int and self.low is not None and self.high is not None:
            return f" of {self.low} to {self.high}{none}"
        bounds = [] if self.low is None else [f"{'more than' if self.above else 'at least'} {self.low:g}"]
        bounds += [] if self.high is None else [f"at most {self.high:g}"]
        return (f" of {' and '.join(bounds)}" if bounds else "") + none


def option(default: Any, doc: str, **declaration: Any) -> Any:
    """Field of a dataclass that is an option, declared by the attributes of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(doc=doc, **declaration)})


def documented(table: type[T]) -> type[T]:
    """Class decorator that lists a dataclass's options in its docstring, for `help()`."""
    wrapper = textwrap.TextWrapper(width=116, initial_indent=" " * 4, subsequent_indent=" " * 8)
    rows = [wrapper.fill(f"{name}: {declared.doc}") for name, declared in options_of(table).items()]
    table.__doc__ = "\n".join([inspect.cleandoc(table.__doc__ or ""), "", "Attributes:", *rows])
    return table


@cache
def options_of(table: type) -> dict[str, Option]:
    """Options of a dataclass by name, in the order of its fields.

    Types are read from the annotations' text, which names them without importing what only a type checker needs.
    """
    options = {}
    for field in dataclasses.fields(table):
        if (declared := field.metadata.get("option")) is None:
            continue
        if not isinstance(field.type, str):
            raise TypeError(f"{table.__name__}: its module needs from __future__ import annotations")
        parts = field.type.split(" | ")
        repeated = any(part.startswith(("list[str", "tuple[str", "Sequence[str")) for part in parts)
        kinds = {"Path": Path, "int": int, "float": float, "bool": bool, "str": str, "Any": str}
        options[field.name] = dataclasses.replace(
            declared,
            name=field.name,
            kind=str if repeated else next((kind for name, kind in kinds.items() if name in parts), None),
            optional="None" in parts,
            repeated=repeated,
            default=field.default,
        )
    return options


def check_options(instance: Any) -> None:
    """Check the options of a frozen dataclass's instance, from its `__post_init__`; numbers become plain ones."""
    for name, declared in options_of(type(instance)).items():
        value = getattr(instance, name)
        if (checked := declared.check(value)) is not value:
            object.__setattr__(instance, name, checked)


def is_whole(value: object) -> TypeGuard[int]:
    """True for a whole number of any library, but not for True and False."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def is_real(value: object) -> TypeGuard[float]:
    """True for a finite number of any library that a float can hold, but not for True and False."""
    if type(value) is float:
        return math.isfinite(value)
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
