"""Losses: of a language model, and of an encoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["contrastive_loss", "next_token_loss"]


def next_token_loss(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B S"], segments: Int[Array, "B S"]
) -> Float[Array, ""]:
    """Mean cross-entropy (nats) of token t + 1 given the scores at t, over a packed batch; S = T + 1.

    A token that begins a document is not predicted from the one before it: `segments` differ there. Segment 0 is
    padding and is not predicted at all.
    """
    counted = ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)).astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    target = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(target * counted) / jnp.maximum(jnp.sum(counted), 1.0)


def contrastive_loss(first: Float[Array, "B D"], second: Float[Array, "B D"], temperature: float) -> Float[Array, ""]:
    """InfoNCE (van den Oord et al., 2018, arXiv:1807.03748) over a batch of pairs, in both directions, in nats.

    Row i of `first` is to find row i of `second` among all of `second`, and the other way round. Vectors have length 1.
    """
    scores = jnp.einsum("id,jd->ij", first, second, precision=jax.lax.Precision.HIGHEST) / temperature
    found = jnp.diagonal(jax.nn.log_softmax(scores, axis=1)) + jnp.diagonal(jax.nn.log_softmax(scores, axis=0))
    return -jnp.mean(found) / 2
