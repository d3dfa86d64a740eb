"""Functions that a request offers to the model, read from the `tools` of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verax.errors import InvalidParameterError

__all__ = ["Function", "read_functions"]

_MAX_REFERENCES = 16
"""References that are followed from one to the next: they may lead in a circle."""

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
"""JSON Schema's name for the type of a value."""


@dataclass(frozen=True)
class Function:
    """Function that the model may call."""

    name: str
    schema: Mapping[str, Any]
    """JSON Schema of its arguments, an object."""
    strict: bool = False
    """True if the arguments have to follow the schema exactly."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Schema of each parameter by its name."""
        properties = self.schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def types(self, parameter: str) -> set[str]:
        """JSON Schema's names of the types that a parameter can have; empty if its schema does not say."""
        return _types(self.parameters.get(parameter), self.schema, _MAX_REFERENCES)


def read_functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Function]:
    """Functions by name.

    Args:
        tools: `{"type": "function", "function": {"name", "parameters", "strict"}}`, or what `function` holds by itself.

    Raises:
        InvalidParameterError: naming the tool that is no function, lacks a name, or has the name of another.
    """
    found: dict[str, Function] = {}
    for i, tool in enumerate(tools or ()):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise InvalidParameterError(f"tools[{i}]: expected a function with a name, got {tool!r}")
        if name in found:
            raise InvalidParameterError(f"tools[{i}]: there is another function with the name {name!r}")
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, Mapping):
            raise InvalidParameterError(f"tools[{i}].function.parameters: expected a JSON schema, got {schema!r}")
        found[name] = Function(name, schema, strict=function.get("strict") is True)
    return found


def _types(schema: Any, root: Mapping[str, Any], references: int) -> set[str]:
    if not isinstance(schema, Mapping) or references == 0:
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, (list, tuple)):
        return {name for name in given if isinstance(name, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, (list, tuple)):
        return {_JSON_TYPES.get(type(value), "object") for value in values}
    if isinstance(schema.get("$ref"), str):
        return _types(_referenced(schema["$ref"], root), root, references - 1)
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        for member in members if isinstance(members, (list, tuple)) else ():
            found |= _types(member, root, references - 1)
    return found


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Part of a schema that a reference such as `#/$defs/Point` names; None if there is none."""
    part: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        part = part.get(key) if isinstance(part, Mapping) else None
    return part
