"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from verax.ops._dispatch import operation

__all__ = ["rms_norm"]


@operation
def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + eps) * weight.astype(jnp.float32)
