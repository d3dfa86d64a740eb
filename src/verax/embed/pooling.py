"""From the hidden states of a sentence's tokens to its vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from verax.nn import Sentences

__all__ = ["POOLINGS", "cut", "normalized", "pool"]

POOLINGS = ("mean", "cls", "lasttoken")
"""The mean over all tokens, special ones included, or the first or the last token's state."""


def pool(
    hidden: Float[Array, "B T D"], sentences: Sentences, pooling: str, skipped: int | Int[Array, ""] = 0
) -> Float[Array, "S D"]:
    """One vector a sentence, float32; padding does not count.

    Args:
        hidden: states.
        sentences: where the sentences lie.
        pooling: one of `POOLINGS`.
        skipped: first tokens that do not count for a mean: those of a prompt.
    """
    if pooling == "mean":
        return sentences.mean(hidden, skipped)
    states = sentences.first(hidden) if pooling == "cls" else sentences.last(hidden)
    return states.astype(jnp.float32)


def normalized(vectors: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Vectors of length 1; zero stays zero."""
    squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))  # torch's normalize has 1e-12 for the length


def cut(vectors: Float32[np.ndarray, "n D"], dimensions: int, normalize: bool = True) -> Float32[np.ndarray, "n d"]:
    """First numbers of each vector, of length 1 again if `normalize` (Kusupati et al., 2022, arXiv:2205.13147)."""
    if dimensions == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dimensions]
    if not normalize:
        return kept.copy()  # not a view, which would hold the whole vectors in memory
    return kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.finfo(np.float32).tiny)
