"""Inverse of a unit lower triangular matrix, stable whatever the keys are.

The matrices of the delta rule (`I + L`, L from products of keys) have small inverses but large powers when keys repeat:
Neumann series, repeated doubling and Newton's iteration multiply those powers and lose every digit. Here inverses of
diagonal blocks are joined pairwise, as in blocked substitution, by products of small matrices only.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

__all__ = ["unit_lower_inverse"]


@jax.custom_vjp
def unit_lower_inverse(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """`(I + lower)^-1` for strictly lower triangular matrices; C is a power of two.

    With X the inverse of the diagonal blocks of size b, and S the blocks of `lower` that couple the odd blocks to the
    even ones before them, `X - X S X` is the inverse of the diagonal blocks of size 2b.
    """
    C = lower.shape[-1]
    inverse = jnp.eye(C, dtype=lower.dtype) - jnp.where(_couples(C, 0), lower, 0.0)
    for level in range(1, int(math.log2(C))):
        step = jnp.where(_couples(C, level), lower, 0.0)
        inverse = inverse - _product(inverse, _product(step, inverse))
    return inverse


def _couples(C: int, level: int) -> np.ndarray:
    """Mask of the rows of odd blocks of size `2^level` and the columns of the block before."""
    block = np.arange(C) >> level
    return (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)


def _forward(lower: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_product(transposed, _product(cotangent, transposed)), -1),)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


unit_lower_inverse.defvjp(_forward, _backward)
