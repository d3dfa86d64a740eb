"""`/tokenize`, `/detokenize`, and counts of tokens."""

import msgspec
import pytest

from verax.serve.text.run import Usage
from verax.text.engine.outputs import CompletionOutput, RequestOutput


def test_a_text_goes_to_tokens_and_back(api):
    for prefix in ("", "/v1"):
        made = api.ok(f"{prefix}/tokenize", {"prompt": "the café 🦊", "return_token_strs": True})
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        assert made["max_model_len"] == 128
        assert api.ok(f"{prefix}/detokenize", {"tokens": made["tokens"]}) == {"prompt": "the café 🦊"}


def test_a_chat_is_rendered_by_the_template(api):
    made = api.ok("/tokenize", {"messages": [{"role": "user", "content": "abc"}]})
    text = api.ok("/detokenize", {"tokens": made["tokens"]})["prompt"]
    assert text == "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(api, path, body, param):
    assert api.refused(path, body)["param"] == param


def output(*parts, prompt=4, cached=1):
    samples = [CompletionOutput(index, "", tuple(tokens), None, None) for index, tokens in parts]
    return RequestOutput("r", None, tuple(range(prompt)), None, samples, False, cached)


def test_all_tokens_of_all_samples_are_counted_once():
    usage = Usage()
    for parts in ([(0, [1, 2, 3]), (1, [4])], [(1, [5, 6])], [(0, [])]):
        usage.add(output(*parts))
    assert msgspec.to_builtins(usage.body()) == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert usage.timings() is None
