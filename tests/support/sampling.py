"""Arguments of `ops.sampling.sample`, a slot for each row with parameters and a seed of its own; its draws compared."""

import jax
import jax.numpy as jnp
import numpy as np

from verax.ops.sampling import SamplingArrays
from verax.sampling_fields import FLOATS, INTS

OFF = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
NO_TOKEN = np.iinfo(np.int32).max


def sampling_arrays(options, *, seed=0, num_prompt=0):
    """Parameters of a slot for each dictionary of options, whose `bias` is {token: value} and `banned` a list."""
    seeds = np.random.default_rng(seed).integers(-(2**31), 2**31, (len(options), 2))
    rows = [
        {"seed_high": high, "seed_low": low, "num_prompt": num_prompt, "num_bias": len(row.get("bias", {})), **row}
        for row, (high, low) in zip(options, seeds.tolist(), strict=True)
    ]
    column = lambda names, dtype: jnp.asarray(
        [[row.get(name, OFF.get(name, 0)) for name in names] for row in rows], dtype
    )
    padded = lambda values, filler: [*values, *[filler] * (4 - len(values))]
    bias = [row.get("bias", {}) for row in rows]
    return SamplingArrays(
        column(FLOATS, jnp.float32),
        column(INTS, jnp.int32),
        jnp.asarray([padded(row, NO_TOKEN) for row in bias], jnp.int32),
        jnp.asarray([padded(row.values(), 0.0) for row in bias], jnp.float32),
        jnp.asarray([padded(row.get("banned", []), NO_TOKEN) for row in rows], jnp.int32),
    )


def sampling_arguments(logits, options, *, seed=0, tokens=None, lengths=None, num_prompt=0, mask=None):
    """Arguments for rows of scores, whose slots hold `tokens` of the given lengths; none without."""
    count = len(options)
    return (
        jnp.asarray(logits, jnp.float32),
        jnp.zeros((count, 1), jnp.int32) if tokens is None else jnp.asarray(tokens, jnp.int32),
        jnp.arange(count),
        jnp.zeros(count, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32),
        sampling_arrays(options, seed=seed, num_prompt=num_prompt),
        None if mask is None else jnp.asarray(mask, jnp.int32),
    )


def assert_same_draws(logits, options, got, expected):
    """Fails unless two forms of the sampler drew the same tokens of some scores.

    They add in different orders: a draw that falls on a boundary may go to the neighbour. Then both are possible and
    the cumulative weights up to them differ by rounding only.
    """
    got, expected = np.asarray(got), np.asarray(expected)
    for row in np.flatnonzero(got != expected):
        scores = np.asarray(logits[row], np.float64) / (options[row].get("temperature", 1.0) or 1)
        weights = np.exp(scores - scores.max())
        between = slice(min(got[row], expected[row]) + 1, max(got[row], expected[row]))
        assert weights[between].sum() < 1e-4 * weights.sum()


def sampling_shapes(rows, vocab, context):
    """Shapes of the arguments of `ops.sampling.sample` in an engine, for sequences of at most `context` tokens."""

    def shapes(dtype, *sizes):
        return [jax.ShapeDtypeStruct((rows, *size), dtype) for size in sizes]

    logits, floats, bias_values = shapes(jnp.float32, (vocab,), (len(FLOATS),), (300,))
    tokens, slots, lengths, ints, bias_ids, banned = shapes(jnp.int32, (context,), (), (), (len(INTS),), (300,), (80,))
    return logits, tokens, slots, lengths, SamplingArrays(floats, ints, bias_ids, bias_values, banned)
