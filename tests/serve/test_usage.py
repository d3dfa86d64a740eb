"""`Usage`: tokens are counted once, however many come at a time and of whichever sample."""

import msgspec

from verax.serve.text.run import Usage
from verax.text.engine.outputs import CompletionOutput, RequestOutput


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
