"""Values of configuration files, checked for type and range before a model is described by them.

A configuration dataclass declares its fields with the types below, and `read_fields` reads them from a config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_type_hints

import msgspec

from verax.errors import CheckpointError, UnsupportedModelError

MAX_SIZE = 1 << 24
"""Largest size of one axis: 16 times the largest published vocabulary, and above the longest published context."""

MAX_NUMBER = 1e30
"""Largest number of a file: what transformers writes for "no limit", and well within float32."""

MAX_DEPTH = 256
"""Most layers of a model: twice the deepest published ones; describing more would take minutes."""

Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE, description=f"a whole number of 1 to {MAX_SIZE}")]
"""Size of an axis: a width, a number of heads, tokens or positions."""

Depth = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEPTH, description=f"a whole number of 1 to {MAX_DEPTH}")]
"""Number of layers or blocks."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE, description=f"a whole number of 0 to {MAX_SIZE}")]
"""Token id, or a number of things that may be none."""

Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1, description="a number of 0 to 1")]
"""Number that keeps a division finite."""

Finite = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER, description="a finite number")]

Positive = Annotated[float, msgspec.Meta(gt=0, le=MAX_NUMBER, description="a number above 0")]
"""Finite number above zero."""

_DESCRIPTIONS = {bool: "true or false", str: "a text", int: "a whole number", float: "a number", dict: "an object"}
_LONGEST_VALUE = 80
"""Characters of a wrong value that a message shows."""

_MISSING: Any = object()


def read_value(config: Mapping[str, Any], key: str, kind: Any, default: Any = _MISSING) -> Any:
    """Read one value of a configuration file.

    Args:
        kind: type that the value must have: a type of this module, or anything that `msgspec.convert` takes.
        default: used where the file has no such key, or null.

    Returns:
        The value, with lists as tuples where `kind` is a tuple, and whole numbers as floats where it is a float.
    """
    value = config.get(key)
    if value is None and default is not _MISSING:
        return default
    where = file_of(config)
    if key not in config:
        raise UnsupportedModelError(f"{where} lacks {key}")
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        shown = repr(value)
        shown = shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}..."
        raise CheckpointError(f"{where}: {key}: expected {_describe(kind, error)}, got {shown}") from error


def read_fields(
    config: Mapping[str, Any],
    cls: type,
    names: Iterable[str] | None = None,
    keys: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Read the values of a dataclass's fields, each checked against its annotation.

    `config`: object of the file, with the fields' names as keys. `keys`: keys of fields that have another name in the
    file.

    Returns:
        The values by field. Fields that the file leaves out, or gives as null, are left out if they have a default.
    """
    kinds, optional = _annotations(cls)
    names = tuple(kinds if names is None else names)
    if missing := [key for name in names if (key := keys.get(name, name)) not in config and name not in optional]:
        raise UnsupportedModelError(f"{file_of(config)} lacks {', '.join(missing)}")
    return {
        name: read_value(config, key, kinds[name])
        for name in names
        if not (config.get(key := keys.get(name, name)) is None and name in optional)
    }


def read_layer_types(
    config: Mapping[str, Any], count: int, default: Sequence[str], known: Collection[str]
) -> tuple[str, ...]:
    """Read `layer_types` of a configuration file, the kind of each layer."""
    kinds = read_value(config, "layer_types", tuple[str, ...], ()) or tuple(default)
    if len(kinds) != count:
        raise CheckpointError(f"{file_of(config)}: layer_types has {len(kinds)} entries for {count} layers")
    if unknown := sorted({*kinds} - {*known}):
        family = config.get("model_type")
        raise UnsupportedModelError(f"{family} with layers of type {', '.join(unknown)} is not supported")
    return kinds


def file_of(config: Mapping[str, Any]) -> str:
    """Name of the file that an object comes from: its path where that is known, else `config.json`."""
    return getattr(config, "where", "config.json")


def require_fields(config: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    """Check that a configuration file has some keys."""
    if missing := [name for name in names if name not in config]:
        where = file_of(config)
        raise UnsupportedModelError(f"{where} of a {what} lacks {', '.join(missing)}")


def check_multiple(config: Mapping[str, Any], **sizes: int) -> None:
    """Check that the first of two named sizes is a multiple of the second."""
    (whole, size), (part, divisor) = sizes.items()
    if size % divisor:
        where = file_of(config)
        raise UnsupportedModelError(f"{where}: {whole} {size} is not a multiple of {part} {divisor}")


@cache
def _annotations(cls: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Types of a dataclass's fields, and the names of those with a default."""
    kinds = get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    without = (dataclasses.MISSING, dataclasses.MISSING)
    optional = frozenset(field.name for field in fields if (field.default, field.default_factory) != without)
    return {field.name: kinds[field.name] for field in fields}, optional


def _describe(kind: Any, error: Exception) -> str:
    """Words for a type; msgspec's own for one that has no description here."""
    if type(None) in (alternatives := get_args(kind)) and len(alternatives) == 2:  # an optional value
        kind = alternatives[alternatives.index(type(None)) - 1]
    if kind in _DESCRIPTIONS:
        return _DESCRIPTIONS[kind]
    metadata = getattr(kind, "__metadata__", ())
    if metadata and metadata[0].description:
        return metadata[0].description
    return str(error).removeprefix("Expected ").partition(", got")[0]
