"""Norms of the last axis, by root mean square (Zhang and Sennrich, 2019, arXiv:1910.07467) and by mean and variance (Ba
et al., 2016, arXiv:1607.06450); and the activation function that PyTorch computes by another formula than JAX.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax.ops._dispatch import Example, check_shapes, float32, operation


def _check_rms(x: Any, weight: Any, eps: Any, *, silu: bool = False, dtype: Any = None) -> None:
    check_shapes(weight=(weight, x.shape[-1:]))


@operation(check=_check_rms)
def rms_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    silu: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*B D"]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, or SiLU of it: in float32, rounded to `dtype`."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(mean_square + eps) * weight.astype(jnp.float32)
    return (jax.nn.silu(y) if silu else y).astype(dtype)


def _check_layer(x: Any, weight: Any, bias: Any, eps: Any, residual: Any = None) -> None:
    check_shapes(weight=(weight, x.shape[-1:]), bias=(bias, x.shape[-1:]), residual=(residual, x.shape))


@operation(check=_check_layer)
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


rms_norm.examples = [
    Example((float32(4, 1024), float32(1024), 1e-6), {"silu": silu}, "with SiLU" if silu else "alone")
    for silu in (False, True)
]


_SIZES = float32(4, 1024), float32(1024), float32(1024)
layer_norm.examples = [
    Example((*_SIZES, 1e-6), label="alone"),
    Example((*_SIZES, 1e-6, float32(4, 1024)), label="with a residual"),
]


@operation
def gelu(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """GELU without approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415): `x / 2 (1 + erf(x / sqrt 2))`.

    This is PyTorch's formula, within 1.2e-6 of the exact values in float32. `jax.nn.gelu` computes `erfc`, which keeps
    the digits of the values near 0 that large negative x have, and takes twice the time on a CPU.
    """
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


gelu.examples = [Example((float32(64, 1536),))]
