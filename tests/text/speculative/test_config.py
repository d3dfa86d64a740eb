"""Options of speculative decoding: vLLM's names, and one clear error for each that is wrong."""

import pytest

from verax.errors import InvalidParameterError
from verax.text.engine.engine_config import EngineConfig
from verax.text.features.speculative_config import SpeculativeConfig


def test_json_text_and_dictionaries_give_the_same_record():
    expected = SpeculativeConfig(4, method="ngram", prompt_lookup_max=3, prompt_lookup_min=2)
    fields = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}'
    for value in (fields, text, expected):
        assert EngineConfig(speculative_config=value).speculation == expected
    assert EngineConfig().speculation is None


@pytest.mark.parametrize(
    ("given", "bounds"), [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2))]
)
def test_a_bound_that_is_left_out_is_the_other(given, bounds):
    config = SpeculativeConfig(4, method="ngram", **given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == bounds


WRONG = {
    "{": "expected JSON such as",
    "[1]": "expected .*, got",
    '{"method": "ngram"}': "num_speculative_tokens: how many",
    '{"num_speculative_tokens": 4}': "method: expected one of .*, got none",
    '{"method": "eagle", "num_speculative_tokens": 4}': "method: expected one of .*, got 'eagle'",
    '{"method": "ngram", "num_speculative_tokens": 0}': "num_speculative_tokens: expected .* from 1 to 32, got 0",
    '{"method": "ngram", "num_speculative_tokens": 33}': "num_speculative_tokens: expected .*, got 33",
    '{"method": "ngram", "num_speculative_tokens": true}': "num_speculative_tokens: expected .*, got True",
    '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 0}': "prompt_lookup_min: expected .*, got 0",
    '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 2}': "is more than",
    '{"method": "ngram", "num_speculative_tokens": 2, "ngram_size": 3}': "ngram_size: no such field",
    '{"method": "ngram", "num_speculative_tokens": 2, "model": "x"}': "model: the method .ngram. has none",
}


@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_value_is_refused_by_name(value):
    with pytest.raises(InvalidParameterError, match=f"^speculative_config: .*{WRONG[value]}"):
        EngineConfig(speculative_config=value)
