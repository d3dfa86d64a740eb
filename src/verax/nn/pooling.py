"""Mean of a sentence's states."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["mean_pool"]


def mean_pool(
    hidden: Float[Array, "B T D"], lengths: Int[Array, "B"], skipped: int | Int[Array, ""] = 0
) -> Float[Array, "B D"]:
    """Mean over the tokens of each sentence, float32, without padding; the mean of nothing is zero.

    Args:
        hidden: states.
        lengths: tokens of each sentence that are not padding.
        skipped: first tokens that do not count.
    """
    places = jnp.arange(hidden.shape[1])
    counted = (places >= skipped) & (places < lengths[:, None])
    # Chosen, not multiplied: what padding holds may be infinite.
    total = jnp.sum(jnp.where(counted[..., None], hidden.astype(jnp.float32), 0), axis=1)
    return total / jnp.maximum(lengths - skipped, 1)[:, None]
