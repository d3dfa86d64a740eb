"""Loss of a language model, and linear layers whose gradients are products in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MAX_SCORES = 1 << 25
"""Scores that are in memory at once: 128 MB, or 220 tokens with a vocabulary of 150,000."""


def weighted_next_token_loss(
    logits: Callable[[Float[Array, "B t D"]], Float[Array, "B t V"]],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> Float[Array, ""]:
    """Sum over all tokens of weight times cross-entropy, in nats.

    Where there are many scores, they are computed for some tokens of each row at a time, and again for the gradient.

    `weights`: weight of each target; zero for padding.
    """

    def part(hidden: Array, targets: Array, weights: Array) -> Array:
        logprobs = jax.nn.log_softmax(logits(hidden).astype(jnp.float32), axis=-1)
        return -jnp.sum(jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0] * weights)

    B, T, _ = hidden.shape
    scores = B * T * jax.eval_shape(logits, hidden[:1, :1]).shape[-1]
    parts = next(n for n in range(1, T + 1) if T % n == 0 and (scores // n <= MAX_SCORES or n == T))
    if parts == 1:
        return part(hidden, targets, weights)
    # Rows stay whole, since several devices divide a batch by them.
    pieces = [jnp.moveaxis(x.reshape(B, parts, T // parts, *x.shape[2:]), 1, 0) for x in (hidden, targets, weights)]
    of_part = jax.checkpoint(part)
    return jax.lax.scan(lambda total, piece: (total + of_part(*piece), None), jnp.zeros(()), tuple(pieces))[0]


@jax.custom_vjp
def _product(x: Float[Array, "*B D"], weight: Float[Array, "F D"]) -> Float[Array, "*B F"]:
    return jnp.einsum("...d,fd->...f", x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)


def _forward(
    x: Float[Array, "*B D"], weight: Float[Array, "F D"]
) -> tuple[Float[Array, "*B F"], tuple[Float[Array, "*B D"], Float[Array, "F D"]]]:
    return _product(x, weight), (x.astype(weight.dtype), weight)


def _backward(
    saved: tuple[Float[Array, "*B D"], Float[Array, "F D"]], gradient: Float[Array, "*B F"]
) -> tuple[Float[Array, "*B D"], Float[Array, "F D"]]:
    x, weight = saved
    gradient = gradient.astype(weight.dtype)
    to_x = jnp.einsum("...f,fd->...d", gradient, weight, preferred_element_type=jnp.float32)
    to_weight = jnp.einsum("...f,...d->fd", gradient, x, preferred_element_type=jnp.float32)
    return to_x, to_weight.astype(weight.dtype)


_product.defvjp(_forward, _backward)


def rounded_gradient_linear(
    x: Float[Array, "*B D"], weight: Float[Array, "F D"], bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    """`ops.linear` whose incoming gradients are rounded to the weight's dtype, for `ops.use_implementations`.

    Without it the two products of the backward pass multiply float32 by bfloat16, which XLA does in float32: on a CPU
    with bfloat16 dot products a whole training step takes 1.3 times as long.
    """
    y = _product(x, weight)
    return y if bias is None else y + bias.astype(jnp.float32)
