"""The record of an answer's form: what it takes, what it refuses and how it says so."""

import pickle

import pytest

from verax.errors import InvalidParameterError
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.structured_outputs import StructuredOutputs


def nested(depth):
    schema = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_a_schema_is_kept_as_text_whatever_it_was_given_as():
    given = StructuredOutputs(json={"type": "object"})
    assert given == StructuredOutputs(json='{"type":"object"}')
    assert given.json == '{"type":"object"}'
    assert hash(given) == hash(StructuredOutputs(json={"type": "object"}))


def test_sampling_params_take_a_record_or_a_dictionary_and_can_be_pickled():
    record = SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"]))
    assert record == SamplingParams(structured_outputs={"choice": ["a", "b"], "regex": None})
    assert pickle.loads(pickle.dumps(record)) == record


def test_an_answer_with_a_form_cannot_ignore_its_end():
    with pytest.raises(InvalidParameterError, match="ignore_eos: "):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "expected exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"json_object": False}, "got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json": "{"}, "json: it is not JSON text"),
        ({"json": "[1]"}, "json: expected a JSON schema, which is an object"),
        ({"json": "[" * 60_000}, "json: it is not JSON text"),
        ({"json": {"a": object()}}, "json: it cannot be written as JSON"),
        ({"json": {"x-guidance": {}}}, "json: x-guidance"),
        ({"json": {"const": "x" * 70_000}}, "json: expected at most 65536 bytes"),
        ({"json": nested(33)}, "json: it is nested deeper than 32"),
        ({"json": {"properties": {f"p{i}": {} for i in range(501)}}}, "json: expected at most 500 properties"),
        ({"json": {"enum": list(range(1001))}}, "json: expected at most 1000 enum values"),
        ({"json": {"allOf": [{"multipleOf": 0}, {"multipleOf": 10.0003}]}}, "json: multipleOf"),
        ({"json": {"multipleOf": 1e300}}, "json: multipleOf"),
        ({"regex": ""}, "regex: expected a text that is not empty"),
        ({"regex": 5}, "regex: expected a text"),
        ({"regex": "\ud800"}, "regex: it is not Unicode text"),
        ({"grammar": "a" * 70_000}, "grammar: expected at most 65536 bytes"),
        ({"choice": []}, "choice: expected 1 to 1000 texts"),
        ({"choice": "yes"}, "choice: expected a list of texts"),
        ({"choice": ["a", ""]}, "choice: expected a text"),
        ({"choice": ["a" * 40_000, "b" * 40_000]}, "choice: expected at most 65536 characters in all"),
        ({"json_object": "yes"}, "json_object: expected True or False"),
        ({"json_object": True, "after": ""}, "after: expected a text"),
        ({"structural_tag": "x"}, "no such field: 'structural_tag'"),
    ],
)
def test_a_wrong_form_is_refused_with_its_field(fields, says):
    with pytest.raises(InvalidParameterError) as refused:
        SamplingParams(structured_outputs=fields)
    assert str(refused.value).startswith("structured_outputs: ")
    assert says in str(refused.value)


def test_another_type_than_a_form_is_refused():
    with pytest.raises(InvalidParameterError, match="structured_outputs: expected StructuredOutputs, or a dictionary"):
        SamplingParams(structured_outputs="json")


@pytest.mark.parametrize("schema", [nested(32), {"enum": list(range(1000))}, {"allOf": [{"multipleOf": 0.25}] * 9}])
def test_a_schema_at_a_limit_is_taken(schema):
    assert StructuredOutputs(json=schema).form == "json"
