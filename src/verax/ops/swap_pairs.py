"""Neighbours of each pair in each other's place, as the interleaved rotary convention needs them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.ops._dispatch import operation
from verax.ops._example import Example, float32

__all__ = ["swap_pairs"]


@operation
def swap_pairs(x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    """`(x2, x1, x4, x3, ...)` for `(x1, x2, x3, x4, ...)` along the last axis, which is even."""
    return x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)


# XLA:TPU reverses an axis of two in a layout with the tokens last. So it copied the queries and keys of Wan there and
# back and, where a kernel fixes the layout of attention's inputs, wrote tables of cos and sin out for all heads, which
# it kept from layer to layer. A permutation in the matrix unit fits the layouts around it (docs/accelerators.md has
# the bytes). Ones and zeros in the highest precision, where a float32 is the sum of three bfloat16 numbers, change no
# bit of finite numbers.
@swap_pairs.implementation("product", platforms=("tpu",), accepts=lambda x: x.dtype == jnp.float32)
def _product(x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    H = x.shape[-1]
    permutation = np.eye(H, dtype=np.float32)[np.arange(H) ^ 1]
    return jnp.einsum("...h,hk->...k", x, permutation, precision=jax.lax.Precision.HIGHEST)


@swap_pairs.example
def _examples() -> list[Example]:
    return [Example((float32(16, 12, 128),))]
