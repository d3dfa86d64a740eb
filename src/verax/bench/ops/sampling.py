"""Sampling by itself: one token for each row of scores over a vocabulary."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from verax.bench.case import Case
from verax.bench.ops.sides import implementations, operation_case, random
from verax.ops.sampling import SamplingArrays, sample
from verax.sampling_fields import FLOATS, INTS

__all__ = ["sampling_case"]

SPREAD = 3.0
"""Standard deviation of the scores: a share of 0.95 of the weight is then some thousands of 151,936 tokens."""

OFF = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0}
"""Parameters that are not off at 0."""


def sampling_case(rows: int, *, vocab: int = 151936, top_k: int = 0, top_p: float = 1.0) -> Case:
    """A draw for each of `rows` sequences, with top-k and top-p unless they are off; the vocabulary is Qwen3's."""
    how = {**OFF, "top_p": top_p, "top_k": top_k}
    floats, ints = (np.tile([how.get(name, 0) for name in names], (rows, 1)) for names in (FLOATS, INTS))
    none = jnp.full((rows, 1), vocab, jnp.int32)
    bias = jnp.zeros((rows, 1), jnp.float32)
    params = SamplingArrays(jnp.asarray(floats, jnp.float32), jnp.asarray(ints, jnp.int32), none, bias, none)
    at = jnp.arange(rows, dtype=jnp.int32)
    logits = SPREAD * random((rows, vocab), "float32", 0)
    arguments = logits, jnp.zeros((rows, 1), jnp.int32), at, at, params
    limits = [f"top-{name} {value}" for name, value, off in (("k", top_k, 0), ("p", top_p, 1)) if value != off]
    return operation_case(
        "sample",
        ", ".join([f"{rows} rows of {vocab}", *limits]),
        "float32",
        logits.nbytes,
        0,
        sample.select(*arguments).name,
        implementations(sample, *arguments),
    )
