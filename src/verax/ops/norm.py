"""Normalisation of the last axis: by root mean square (Zhang and Sennrich, 2019, arXiv:1910.07467), and by mean and
variance (Ba et al., 2016, arXiv:1607.06450)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from verax.ops._dispatch import operation
from verax.ops._example import Example, float32

__all__ = ["layer_norm", "rms_norm"]


@operation
def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + eps) * weight.astype(jnp.float32)


@operation
def layer_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D"],
    bias: Float[Array, "D"],
    eps: float,
    residual: Float[Array, "*B D"] | None = None,
) -> Float[Array, "*B D"]:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last axis, in float32.

    With a residual, x is the sum of both.
    """
    x = x.astype(jnp.float32)
    if residual is not None:
        x = x + residual.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * weight.astype(jnp.float32) + bias.astype(jnp.float32)


@rms_norm.example
def _rms_norm_examples() -> list[Example]:
    return [Example((float32(4, 1024), float32(1024), 1e-6))]


@layer_norm.example
def _layer_norm_examples() -> list[Example]:
    sizes = float32(4, 1024), float32(1024), float32(1024)
    return [Example((*sizes, 1e-6)), Example((*sizes, 1e-6, float32(4, 1024)))]
