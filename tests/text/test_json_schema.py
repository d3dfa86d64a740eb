"""JSON schemas with exact whole numbers, formats as annotations, lists as tuples."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.grammar import accepts as accepts_lark
from verax.errors import InvalidParameterError
from verax.text.features.json_schema import schema_rule

COMPACT = {"whitespace_flexible": False, "coerce_one_of": True}
SPACED = {**COMPACT, "item_separator": ", ", "key_separator": ": "}

ID = 175928847299117063
NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
}
OPEN = {"type": "object", "properties": {"id": {"const": ID}, "name": {"type": "string"}}}
CLOSED = {
    "type": "object",
    "title": "Closed",
    "properties": {"id": {"enum": [ID, ID + 2], "type": "integer"}, "name": {"$ref": "#/$defs/name"}, "tags": True},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 3}},
}


def accepts(schema, text, options=COMPACT):
    rules = {}
    body = schema_rule(schema, options, rules)
    lark = "\n".join(f"{name}: {text}" for name, text in {"start": body, **rules}.items())
    return accepts_lark(lark, text)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": ID}, [ID], [ID + 1, int(float(ID)), "x"]),
        ({"enum": [ID, "a", {"b": [ID, 1.5]}]}, [ID, "a", {"b": [ID, 1.5]}], [{"b": [ID + 1, 1.5]}]),
        ({"enum": [ID, str(ID)], "type": "string"}, [str(ID)], [ID]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 7, 2**64 - 1], [-1, 2**64]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-5, -(2**63), 2**63 - 1], [2**63]),
        ({"type": "integer", "exclusiveMinimum": 2**53 + 1}, [2**53 + 2, 2**90], [2**53 + 1, 0, -(2**60)]),
        ({"type": "number", "minimum": -1, "maximum": 10.0**18}, [0.5, 10**18], [-2, 10**18 + 1]),
        ({"type": ["integer", "null"], "maximum": 2**63}, [None, 2**63], [2**63 + 1, "a"]),
        ({"type": "array", "items": {"const": ID}, "minItems": 1, "maxItems": 2}, [[ID], [ID, ID]], [[], [ID] * 3]),
        ({"type": "array", "items": {"const": ID}}, [[], [ID] * 3], [[ID, 1]]),
        ({"type": "array", "items": {"const": ID}, "maxItems": 1}, [[], [ID]], [[ID, ID]]),
        ({"type": "array", "items": {"const": ID}, "maxItems": 0}, [[]], [[ID]]),
        ({"type": "object", "additionalProperties": {"const": ID}}, [{}, {"a": ID, "b": ID}], [{"a": 1}]),
        (OPEN, [{}, {"id": ID}, {"id": ID, "x": [1]}, {"name": "a"}, {"x": 1, "y": {}}], [{"id": 1}, {"name": 1}]),
        (CLOSED, [{"name": "a"}, {"id": ID + 2, "name": "b", "tags": [1]}], [{}, {"id": ID}, {"name": "abcd"},
         {"name": "a", "x": 1}, {"id": ID + 1, "name": "a"}]),
        ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, [{"value": 2**64 - 1, "next": {"value": 1, "next": None}}],
         [{"value": 2**64, "next": None}, {"value": 1}]),
        ({"oneOf": [{"const": ID}, {"type": "boolean"}]}, [ID, True], [ID + 1, None]),
        ({"allOf": [{"const": ID}], "description": "one"}, [ID], [ID + 1]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": False, "maximum": 2**64, "exclusiveMaximum": True},
         [0, 2**64 - 1], [-1, 2**64]),
        # A zod record: QuackbackIO/quackback#507, xgrammar#826.
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"const": 1}}, [{"a": 1}],
         [{"a": 2}]),
        ({"items": {"const": 1}, "type": "array", "uniqueItems": False, "unevaluatedItems": True}, [[1, 1]], [[2]]),
        ({"type": "object", "dependentRequired": {}, "dependencies": {}}, [{"a": 1}], [1]),
        ({"$defs": {"A[b c]": {"const": 1}}, "$ref": "#/$defs/A[b c]"}, [1], [2]),
        ({"$defs": {"A[b c]": {"const": ID}}, "anyOf": [{"$ref": "#/$defs/A%5Bb%20c]"}]}, [ID], [ID + 1]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
          "items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False},
         [[1, "a"]], [[1, 1], [1, "a", 2]]),
        # Characters that JSON escapes, in classes that exclude them.
        ({"type": "string", "pattern": r'^[^\\/:*?"<>|]+$'}, ["a b\n"], ['a"b', "a\\b", "a/b", ""]),
        ({"type": "string", "pattern": r'^\[[^]"]+[^-"]$'}, ["[ab", "[--a"], ['["b', "[]b", "[a-", '[a"']),
        ({"type": "object", "patternProperties": {'^[^"]$': {"const": 1}}, "additionalProperties": False},
         [{"a": 1}], [{'"': 1}]),
    ],
)  # fmt: skip
def test_what_a_schema_allows(schema, right, wrong):
    for options, separators in ((COMPACT, (",", ":")), (SPACED, (", ", ": "))):
        assert [
            value for value in right if not accepts(schema, json.dumps(value, separators=separators), options)
        ] == []
        assert [value for value in wrong if accepts(schema, json.dumps(value, separators=separators), options)] == []


@pytest.mark.parametrize("key", ["title", "default", "examples", "deprecated", "readOnly", "$comment", "$schema", "$id",
                                 "contentEncoding", "nullable", "x-order"])  # fmt: skip
def test_annotations_are_ignored(key):
    assert accepts({"type": "object", key: "https://example.org/x"}, "{}")


@pytest.mark.parametrize("key", ["not", "if", "then", "else", "contains", "propertyNames", "dependentRequired",
                                 "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(key):
    with pytest.raises(ValueError, match=rf'Unimplemented keys: \["{key}"\]'):
        accepts({"type": "object", key: {"a": ["b"]}}, "{}")


NUMBERS = st.one_of(st.integers(-(10**20), 10**20), st.integers(-200, 200))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.none() | NUMBERS, st.none() | NUMBERS, st.lists(NUMBERS, max_size=20))
def test_limits_are_exact(low, high, values):
    low, high = (high, low) if low is not None and high is not None and low > high else (low, high)
    limits = {"minimum": low, "maximum": high, "exclusiveMaximum": 10**40}  # the last one makes the rule ours
    limits = {key: value for key, value in limits.items() if value is not None}
    pattern = re.compile(schema_rule({"type": "integer", **limits}, COMPACT, {}).strip("/"))
    near = [end + step for end in (low, high) if end is not None for step in (-11, -10, -1, 0, 1, 9, 10)]
    for value in (0, 1, -1, *values, *near):
        inside = (low is None or low <= value) and (high is None or value <= high)
        assert bool(pattern.fullmatch(str(value))) == inside
    assert not pattern.fullmatch("-0")
    assert not pattern.fullmatch("007")


@pytest.mark.parametrize("name", ["path", "binary", "password", "byte", "uri-reference", "int64", "no-such-format"])
def test_an_unknown_format_is_an_annotation(name):
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": name}}, "required": ["format"]}
    assert accepts(schema, '{"format":"a"}')
    assert accepts({"const": {"format": name}}, json.dumps({"format": name}, separators=(",", ":")))
    assert not accepts({"type": "string", "format": "date"}, '"a"')


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "number", "maximum": 2**64}, "type 'number' cannot be combined with whole numbers beyond"),
        ({"minimum": 2**64}, "type None cannot be combined"),
        ({"type": "array", "prefixItems": [{"const": ID}]}, "prefixItems cannot be combined"),
        ({"allOf": [{"const": ID}, {}]}, "allOf of several schemas"),
        ({"anyOf": [{"const": ID}], "minimum": 1}, "minimum cannot be combined"),
        ({**OPEN, "required": ["x"]}, "required 'x' is not in properties"),
        ({"const": ID, "type": "string"}, "no value has the schema's type"),
        ({"type": "integer", "minimum": 2**60, "maximum": 5}, "no whole number is"),
        ({"type": "integer", "minimum": 10**200}, "at most 100 digits"),
        ({"type": "integer", "minimum": 2**60, "maximum": "x"}, "it is not a JSON schema"),
        ({"type": "object", "properties": {"a": {"const": ID}}, "required": 5}, "it is not a JSON schema"),
        ({"anyOf": [{"const": ID}, {"$ref": "#/properties/x"}], "properties": {"x": {}}}, "cannot be combined"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(schema, says):
    with pytest.raises(InvalidParameterError, match=says):
        accepts(schema, "1")
