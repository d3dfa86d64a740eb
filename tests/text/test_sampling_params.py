"""Sampling parameters and forms: bad values are refused by name, good ones normalised. Outputs as JSON."""

import json
import math
import pickle

import numpy as np
import pytest

from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.sampling_fields import MAX_LOGIT_BIAS
from verax.text.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from verax.text.engine.sampling_params import SamplingParams, StructuredOutputs

BAD = {
    "n": [0, 129, True, 1.0],
    "temperature": [-0.1, math.nan, math.inf, "0.7", True, 10**400],
    "top_p": [-0.1, 1.1],
    "top_k": [-2, 2.5, 2**31],
    "min_p": [-0.1, 1.5],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0.0, math.inf],
    "seed": [-1, 2**63],
    "max_tokens": [0, "16"],
    "min_tokens": [-1, 17],
    "stop": ["", ["a", ""], [3], 0, b"x", {"a": "b"}],
    "stop_token_ids": [["a"], list(range(65)), 0, "12", [-1], [True]],
    "logprobs": [21],
    "prompt_logprobs": [-1],
    "logit_bias": [
        *({3: 101}, {"3": 1.0}, {3: math.nan}, [3], {-1: 1.0}, {3: True}),
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),
    ],
    "ignore_eos": [1],
    "skip_special_tokens": [None],
    "include_stop_str_in_output": ["no"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_its_field_first(name, value):
    with pytest.raises(InvalidParameterError, match=rf"^{name}: expected .* got "):
        SamplingParams(**{name: value})


def test_spellings_of_the_same_become_the_same():
    a = SamplingParams(stop="x", stop_token_ids=[np.int64(3)], top_k=-1, temperature=1, logit_bias={np.int32(4): 2})
    b = SamplingParams(stop=["x"], stop_token_ids=(3,), top_k=0, temperature=1.0, logit_bias={4: 2.0})
    assert a == b
    assert a.stop_texts == ("x",)
    assert type(a.stop_tokens[0]) is int


def test_a_generation_config_gives_defaults():
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": 3, "min_p": None}
    params = SamplingParams.from_generation_config(config)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.95, 20, 16)
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6, "typical_p": 0.9}).greedy
    assert SamplingParams.from_generation_config({"stop_strings": ["</answer>"]}) == SamplingParams(stop="</answer>")
    penalised = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "max_new_tokens": 2048}
    expected = SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, max_tokens=2048)
    assert SamplingParams.from_generation_config(penalised) == expected
    inert = {
        "num_return_sequences": 1,
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "typical_p": 1.0,
        "bad_words_ids": [],
        "top_h": None,
    }
    inert |= {"encoder_repetition_penalty": 1.0, "token_healing": False}
    assert SamplingParams.from_generation_config(inert) == SamplingParams()


@pytest.mark.parametrize(
    "config",
    [{"no_repeat_ngram_size": 3}, {"num_beams": 4}, {"bad_words_ids": [[1]]}, {"typical_p": 0.9}, {"mirostat": 2},
     {"encoder_repetition_penalty": 1.2}, {"encoder_no_repeat_ngram_size": 2}, {"token_healing": True},
     {"num_return_sequences": 3}],
    ids=str,
)  # fmt: skip
def test_a_setting_that_is_not_implemented_is_refused_by_name(config):
    with pytest.raises(UnsupportedModelError, match=next(iter(config))):
        SamplingParams.from_generation_config(config)


GOOD = {
    "min_tokens": [0, 16],
    "stop": [None, [], ("a", "b")],
    "stop_token_ids": [None, range(64)],
    "logit_bias": [None, {}, {0: -100, 1: 100}],
}


def test_limits_are_allowed():
    for name, values in GOOD.items():
        for value in values:
            SamplingParams(**{name: value})


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
        ("json", "expected StructuredOutputs, or a dictionary"),
    ],
)
def test_a_wrong_form_is_refused_with_its_field(fields, says):
    with pytest.raises(InvalidParameterError) as refused:
        SamplingParams(structured_outputs=fields)
    assert str(refused.value).startswith("structured_outputs: ")
    assert says in str(refused.value)


@pytest.mark.parametrize("schema", [nested(32), {"enum": list(range(1000))}, {"allOf": [{"multipleOf": 0.25}] * 9}])
def test_a_schema_at_a_limit_is_taken(schema):
    assert StructuredOutputs(json=schema).form == "json"


BEST = {5: Logprob(-0.25, 1, "a"), 7: Logprob(float("-inf"), 2, "é")}
COMPLETION = CompletionOutput(0, "a", (5,), -0.25, [BEST], "stop", "END")
OUTPUT = RequestOutput("r", "hi", (1, 2), [None, BEST], [COMPLETION], True, 0, RequestMetrics(10.0, 10.5, 12.0))


def test_the_dictionary_is_strict_json_without_infinities():
    back = json.loads(json.dumps(OUTPUT.to_dict(), allow_nan=False))
    assert back["outputs"][0]["logprobs"] == [
        {
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            "7": {"logprob": None, "rank": 2, "decoded_token": "é"},
        }
    ]
    assert back["prompt_logprobs"][0] is None
    assert back["prompt_token_ids"] == [1, 2]
    assert (back["outputs"][0]["finish_reason"], back["outputs"][0]["stop_reason"]) == ("stop", "END")
    times = {"time_to_first_token": 0.5, "total_time": 2.0}
    assert back["metrics"] == {**times, "num_draft_tokens": 0, "num_accepted_tokens": 0}
