"""From the hidden states of a sentence's tokens to its vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["POOLINGS", "normalized", "pool"]

POOLINGS = ("mean", "cls")
"""The mean over all tokens, special ones included, or the first token's state."""


def pool(hidden: Float[Array, "B T D"], lengths: Int[Array, "B"], pooling: str) -> Float[Array, "B D"]:
    """One vector a sentence, float32; padding does not count, and the mean of nothing is zero."""
    if pooling == "cls":
        return hidden[:, 0].astype(jnp.float32)
    real = jnp.arange(hidden.shape[1]) < lengths[:, None]
    # Chosen, not multiplied: what padding holds may be infinite.
    total = jnp.sum(jnp.where(real[..., None], hidden.astype(jnp.float32), 0), axis=1)
    return total / jnp.maximum(lengths, 1)[:, None]


def normalized(vectors: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Vectors of length 1; zero stays zero."""
    squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))  # torch's normalize has 1e-12 for the length
