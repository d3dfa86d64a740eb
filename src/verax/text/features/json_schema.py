"""JSON schemas in llguidance's notation. What the library reads otherwise than the standard is written out here.

llguidance reads numbers as 64-bit floats, which cannot hold every whole number beyond 2**53. Schemas with such a number
in `const`, `enum` or a limit, and the schemas around them, become rules of a grammar: objects, arrays, alternatives,
and regular expressions of whole numbers. All other schemas are left to the library.

By the standard `format` is an annotation: names that the library does not know are dropped, and so are keys that the
library refuses where their value has no effect. Lists of `items` and boolean limits, of older drafts, become what the
newest one has for them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from verax.errors import InvalidParameterError

EXACT = 2**53
"""Largest whole number up to which 64-bit floats hold all."""

MAX_DIGITS = 100

JSON_OPTIONS = {"whitespace_flexible": False, "coerce_one_of": True}
"""llguidance's options for an answer that is JSON: no free whitespace, of which a model could write without end, and
`oneOf` is read as `anyOf`."""

_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that the library enforces."""

_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
"""Keys whose value is not a schema."""

_DEFINITIONS = ("$defs", "definitions")
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", *_DEFINITIONS})
"""Keys whose value has schemas by name."""

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
"""Values of keys that allow everything: the library refuses some of these keys, whatever their value."""

_NEGATED = re.compile(r"\\.|\[\^([]-]?)", re.DOTALL)
"""Beginning of a negated class in a regular expression, with a bracket or dash that is its first member, or any escape.
"""

_LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "format", "$schema", "$id", *_DEFINITIONS})
_KEYS = {
    "const": {"const", "type"},
    "enum": {"enum", "type"},
    "anyOf": {"anyOf"},
    "oneOf": {"oneOf"},
    "allOf": {"allOf"},
    "$ref": {"$ref"},
    "integer": {"type", *_LIMITS},
    "array": {"type", "items", "minItems", "maxItems"},
    "object": {"type", "properties", "required", "additionalProperties"},
}
"""Keys that a rule is written of, by the key or the type that decides; annotations come on top."""

_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def schema_rule(schema: Mapping[str, Any], options: Mapping[str, Any], rules: dict[str, str]) -> str:
    """Body of a rule that is JSON of a schema.

    `options`: llguidance's options for JSON. `rules`: bodies of rules by name, to which those that the schema needs are
    added.
    """
    root = _standard(schema)
    try:
        return _Writer(root, options, rules).body(root)
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise InvalidParameterError(f"it is not a JSON schema: {error!r}") from error


def _standard(schema: Any) -> Any:
    """A schema by the newest draft, without formats that are annotations only, and keys without effect."""
    if isinstance(schema, list):
        return [_standard(member) for member in schema]
    if not isinstance(schema, Mapping):
        return schema
    standard: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            standard[key] = value
        elif key == "pattern" and isinstance(value, str):
            standard[key] = _without_nul(value)
        elif key == "patternProperties" and isinstance(value, Mapping):
            standard[key] = {_without_nul(name): _standard(member) for name, member in value.items()}
        elif key in _NAMED and isinstance(value, Mapping):
            standard[key] = {name: _standard(member) for name, member in value.items()}
        elif key == "$ref" and isinstance(value, str):
            standard[key] = quote(value, safe="!#$%&'()*+,/:;=?@~")
        elif key == "$schema" or value in _WITHOUT_EFFECT.get(key, ()):
            continue
        elif key != "format" or not isinstance(value, str) or value in _FORMATS:
            standard[key] = _standard(value)
    if isinstance(standard.get("items"), list):
        standard["prefixItems"] = standard.pop("items")
        if "additionalItems" in standard:
            standard["items"] = standard.pop("additionalItems")
    for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        # Draft 4 says with a boolean whether the other limit is itself excluded.
        if isinstance(standard.get(exclusive), bool) and standard.pop(exclusive) and limit in standard:
            standard[exclusive] = standard.pop(limit)
    return standard


def _without_nul(pattern: str) -> str:
    """A pattern whose negated classes lack NUL.

    In a JSON string, the library takes quotes and backslashes for members of any class that has all control characters:
    an answer to `[^"]` could be a quote.
    """
    return _NEGATED.sub(lambda found: rf"[^\x00{re.escape(found[1])}" if found[0][0] == "[" else found[0], pattern)


class _Writer:
    """Writer of the rules of one schema."""

    def __init__(self, root: Mapping[str, Any], options: Mapping[str, Any], rules: dict[str, str]):
        self._root = root
        self._options = options
        self._rules = rules
        self._references: dict[str, str] = {}
        self._comma = literal(options.get("item_separator", ","))
        self._colon = options.get("key_separator", ":")
        self._targets: dict[str, Any] = {}
        users: dict[str, list[str]] = {}
        waiting = _references(root)
        while waiting:
            if (target := waiting.pop()) not in self._targets:
                self._targets[target] = schema = referenced(target, root)
                waiting += (inner := _references(schema))
                for name in inner:
                    users.setdefault(name, []).append(target)
        self._wide: set[str] = set()
        """References that lead to a number that the library does not read exactly."""
        waiting = [target for target, schema in self._targets.items() if _is_wide(schema)]
        while waiting:
            if (target := waiting.pop()) not in self._wide:
                self._wide.add(target)
                waiting += users.get(target, [])

    def body(self, schema: Any) -> str:
        """Body of a rule of a schema: the library's own where that is exact."""
        if not self._is_wide(schema):
            return self._json(schema)
        types = schema.get("type")
        kind = next((key for key in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf") if key in schema), types)
        if isinstance(kind, list):
            rest = {key: value for key, value in schema.items() if key not in _LIMITS}
            numbers = ("integer", "number")
            return self._any({"anyOf": [{**(schema if name in numbers else rest), "type": name} for name in kind]})
        unknown = sorted(set(schema) - _KEYS.get(kind, set(schema)) - _ANNOTATIONS)
        if kind not in _KEYS or unknown:
            what = unknown[0] if unknown else f"type {kind!r}"
            raise InvalidParameterError(f"{what} cannot be combined with whole numbers beyond 2**53")
        return {
            "$ref": self._reference,
            "const": self._values,
            "enum": self._values,
            "anyOf": self._any,
            "oneOf": self._any,
            "allOf": self._all,
            "integer": _integer,
            "array": self._array,
            "object": self._object,
        }[kind](schema)

    def _json(self, schema: Any) -> str:
        if schema is not self._root:
            if any(not name.startswith(("#/$defs/", "#/definitions/")) for name in self._targets):
                raise InvalidParameterError("only references to $defs can be combined with whole numbers beyond 2**53")
            definitions = {key: self._root[key] for key in _DEFINITIONS if key in self._root}
            schema = {**definitions, **(schema if isinstance(schema, Mapping) else {} if schema else {"not": {}})}
        return "%json " + json.dumps({"x-guidance": self._options, **schema}, ensure_ascii=False)

    def _is_wide(self, schema: Any) -> bool:
        """True if a schema has a number that the library does not read exactly, through references too."""
        return _is_wide(schema) or not self._wide.isdisjoint(_references(schema))

    def _new(self, body: str = "") -> str:
        """Name of a new rule."""
        name = f"schema_{len(self._rules)}"
        self._rules[name] = body
        return name

    def _reference(self, schema: Mapping[str, Any]) -> str:
        target = schema["$ref"]
        if not isinstance(self._targets[target], (Mapping, bool)):
            raise InvalidParameterError(f"$ref: there is no {target!r} in the schema")
        if target not in self._references:
            self._references[target] = name = self._new()
            self._rules[name] = self.body(self._targets[target])
        return self._references[target]

    def _values(self, schema: Mapping[str, Any]) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        types = schema.get("type", list(_TYPES))
        types = [types] if isinstance(types, str) else types
        values = [value for value in values if any(_TYPES[name](value) for name in types if name in _TYPES)]
        if not values:
            raise InvalidParameterError("no value has the schema's type")
        separators = (self._options.get("item_separator", ","), self._colon)
        texts = (json.dumps(value, ensure_ascii=False, separators=separators) for value in values)
        return f"({' | '.join(map(literal, texts))})"

    def _any(self, schema: Mapping[str, Any]) -> str:
        members = schema["anyOf"] if "anyOf" in schema else schema["oneOf"]
        return f"({' | '.join(self.body(member) for member in members)})"

    def _all(self, schema: Mapping[str, Any]) -> str:
        if len(schema["allOf"]) != 1:
            raise InvalidParameterError("allOf of several schemas cannot be combined with whole numbers beyond 2**53")
        return self.body(schema["allOf"][0])

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._new(self.body(schema["items"]))
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high is not None and high < low:
            raise InvalidParameterError(f"maxItems: {high} is less than minItems: {low}")
        more = f"({self._comma} {item}){{{max(0, low - 1)},{'' if high is None else high - 1}}}" if high != 1 else ""
        return f'"[" ({item} {more}){"" if low else "?"} "]"' if high != 0 else '"[" "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Body of an object: its properties in their order, then other members."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if missing := [name for name in required if name not in properties]:
            raise InvalidParameterError(
                f"required {missing[0]!r} is not in properties, next to whole numbers beyond 2**53"
            )
        others = schema.get("additionalProperties", True)
        rest = "" if others is False else self._others(list(properties), others)
        after = self._new(f"({self._comma} {rest})*" if rest else "")
        begins = [f"({rest} {after})?" if rest else ""]
        for name, member in reversed(properties.items()):
            written = f"{literal(json.dumps(name, ensure_ascii=False) + self._colon)} {self._new(self.body(member))}"
            begins = [f"{written} {after}", *(begins if name not in required else [])]
            after = self._new(f"({self._comma} {written}){'' if name in required else '?'} {after}")
        return f'"{{" ({" | ".join(begins)}) "}}"'

    def _others(self, names: list[str], schema: Any) -> str:
        """Body of a member whose key is none of some names."""
        key, known = f"KEY_{len(self._rules)}", "|".join(map(_regex, names))
        string = r'/"([^"\\\x00-\x1F]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/'
        self._rules[key] = f'{string} & ~/"({known})"/' if names else string
        return f"{key} {literal(self._colon)} {self._new(self.body(schema))}"


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all schemas within, without definitions."""
    if isinstance(schema, list):
        for member in schema:
            yield from _schemas(member)
    elif isinstance(schema, Mapping):
        yield schema
        for key, value in schema.items():
            if key not in _VALUES and key not in _DEFINITIONS:
                yield from _schemas(list(value.values()) if key in _NAMED and isinstance(value, Mapping) else value)


def _references(schema: Any) -> list[str]:
    return [one["$ref"] for one in _schemas(schema) if isinstance(one.get("$ref"), str)]


def _is_wide(schema: Any) -> bool:
    """True if a schema has a number that the library does not read exactly."""
    return any(
        _has_wide(one.get(key)) and not (one.get("type") == "number" and _is_exact(one.get(key)))
        for one in _schemas(schema)
        for key in ("const", "enum", *_LIMITS)
    )


def _is_exact(limit: Any) -> bool:
    """True if the library reads a limit of a `number` exactly, and can write its regular expression."""
    return _is_number(limit) and abs(limit) < 2**63 and float(limit) == limit


def referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Part of a schema that a reference such as `#/$defs/Point` names; None if there is none."""
    head, *keys = unquote(reference).split("/")
    part: Any = root if head == "#" else None
    for key in keys:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdecimal():
            part = part[int(key)] if int(key) < len(part) else None
        else:
            part = part.get(key) if isinstance(part, Mapping) else None
    return part


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_wide(value: Any) -> bool:
    """True if a value is or has a number that 64-bit floats may not hold, or one that JSON writes with an exponent."""
    if isinstance(value, (list, Mapping)):
        return any(map(_has_wide, value.values() if isinstance(value, Mapping) else value))
    return _is_number(value) and abs(value) > EXACT


def _integer(schema: Mapping[str, Any]) -> str:
    """Regular expression of the whole numbers within limits."""
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    lows += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    low, high = max(lows, default=None), min(highs, default=None)
    if any(abs(number) >= 10**MAX_DIGITS for number in (*lows, *highs)):
        raise InvalidParameterError(f"expected whole numbers of at most {MAX_DIGITS} digits")
    if low is not None and high is not None and low > high:
        raise InvalidParameterError(f"no whole number is {low} or more and {high} or less")
    parts = []
    if low is None or low < 0:
        parts.append(
            f"-({_digits(max(1, -(high or 0)) if high is None or high < 0 else 1, None if low is None else -low)})"
        )
    if high is None or high >= 0:
        parts.append(_digits(max(0, low or 0), high))
    return f"/{'|'.join(parts)}/"


def _digits(low: int, high: int | None) -> str:
    """Regular expression of the numbers from `low`, 0 or more, to `high`."""
    if high is None:
        digits = len(str(low))
        return f"{_digits(low, 10**digits - 1)}|[1-9][0-9]{{{digits},}}"
    parts = ["0"] if low == 0 else []
    for digits in range(len(str(low)), len(str(high)) + 1):
        begin, end = max(low, 10 ** (digits - 1)), min(high, 10**digits - 1)
        parts += [_same_length(str(begin), str(end))] if begin <= end else []
    return "|".join(parts)


def _same_length(low: str, high: str) -> str:
    """Regular expression of the digits from `low` to `high`, which are as long."""
    if not low or low[0] == high[0]:
        return low[:1] + _same_length(low[1:], high[1:]) if low else ""
    rest, first, last, parts = len(low) - 1, int(low[0]), int(high[0]), []
    if low[1:].strip("0"):
        parts.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{rest}}}" if rest else f"[{first}-{last}]")
    return f"({'|'.join(parts)})"


def literal(text: str) -> str:
    """A text as the grammar has it."""
    return json.dumps(text, ensure_ascii=False)


def _regex(name: str) -> str:
    """Regular expression of a key's JSON text without its quotes."""
    return "".join(rf"\x{{{ord(char):X}}}" for char in json.dumps(name, ensure_ascii=False)[1:-1])
