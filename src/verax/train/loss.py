"""Losses of a language model and of an encoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["contrastive_loss", "next_token_loss"]


def next_token_loss(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B S"], segments: Int[Array, "B S"]
) -> Float[Array, ""]:
    """Mean cross-entropy, in nats, of token t + 1 given the logits at t, over a packed batch; S = T + 1.

    The first token of a document is not predicted: its segment differs from that of the token before it. Padding
    (segment 0) is not predicted either.
    """
    counted = ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)).astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    target = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(target * counted) / jnp.maximum(jnp.sum(counted), 1.0)


def contrastive_loss(first: Float[Array, "B D"], second: Float[Array, "B D"], temperature: float) -> Float[Array, ""]:
    """InfoNCE (van den Oord et al., 2018, arXiv:1807.03748) over a batch of pairs, in both directions, in nats.

    Row i of `first` is classified among all rows of `second`, with row i as the label, and vice versa. Vectors have
    length 1.
    """
    scores = jnp.einsum("id,jd->ij", first, second, precision=jax.lax.Precision.HIGHEST) / temperature
    found = jnp.diagonal(jax.nn.log_softmax(scores, axis=1)) + jnp.diagonal(jax.nn.log_softmax(scores, axis=0))
    return -jnp.mean(found) / 2
