"""Products within kernels for TPUs."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from verax.ops.attention import exact_products

__all__ = ["product"]


def product(x: Array, y: Array, axes: tuple[int, int] = (1, 0)) -> Array:
    """Product of two matrices over one axis of each, in float32; of float32 numbers exact but for its sums."""
    return lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=exact_products(x),
        preferred_element_type=jnp.float32,
    )
