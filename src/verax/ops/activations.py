"""Activation functions that PyTorch computes by another formula than JAX."""

from __future__ import annotations

import math

from jax import lax
from jaxtyping import Array, Float

from verax.ops._dispatch import operation
from verax.ops._example import Example, float32

__all__ = ["gelu"]


@operation
def gelu(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """GELU without approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415): `x / 2 (1 + erf(x / sqrt 2))`.

    This is PyTorch's formula, within 1.2e-6 of the exact values in float32. `jax.nn.gelu` computes `erfc`, which keeps
    the digits of the values near 0 that large negative x have, and takes twice the time on a CPU.
    """
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


@gelu.example
def _gelu_examples() -> list[Example]:
    return [Example((float32(64, 1536),))]
