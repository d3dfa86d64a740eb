"""Sequences and requests without an engine, for the tests of the scheduler and the block manager."""

from verax.text.engine.outputs import RequestMetrics
from verax.text.engine.request import Request, Sequence
from verax.text.engine.sampling_params import SamplingParams


def make_sequence(tokens, *, max_tokens=100, name="r", **params):
    params = SamplingParams(max_tokens=max_tokens, **params)
    request = Request(name, None, tuple(tokens), params, max_tokens, RequestMetrics(0.0))
    request.sequences = [Sequence(request, 0, 0, list(tokens))]
    return request.sequences[0]


def admit(blocks, sequence, num_tokens, **options):
    """Give a sequence the blocks of its cached prefix, if there is room for `num_tokens`; False if there is not."""
    prefixes = blocks.find_room(sequence, num_tokens, **options)
    if prefixes is None:
        return False
    blocks.admit(sequence, prefixes)
    return True
