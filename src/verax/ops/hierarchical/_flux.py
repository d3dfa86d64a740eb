"""The flux of LAM's rule: a number between 0 and 1 for each token (phi) and for each chunk of tokens (psi)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

__all__ = ["Perceptron", "ResonanceFlux", "chunk_flux", "token_flux"]

LOWEST, HIGHEST = 0.01, 0.99


class Perceptron(NamedTuple):
    """Weights of `w2 silu(w1 x + b1) + b2`, a single number out."""

    w1: Float[Array, "hidden D"]
    b1: Float[Array, "hidden"]
    w2: Float[Array, "1 hidden"]
    b2: Float[Array, "1"]


class ResonanceFlux(NamedTuple):
    """Weights of both fluxes. The perceptrons are shared by all heads."""

    bilinear: Float[Array, "H K V"]
    temperature: Float[Array, "H"]
    chunk: Perceptron
    """Perceptron of `[mean key, mean value, mean score]`: D is K + V + 1."""
    token: Perceptron
    """Perceptron of `[key, value]`: D is K + V."""


def token_flux(k: Float[Array, "*B K"], v: Float[Array, "*B V"], weights: Perceptron) -> Float[Array, "*B"]:
    """phi of each token's key and value, both scaled by beta."""
    return _flux(weights, k, v)


def chunk_flux(
    key: Float[Array, "*B H K"],
    value: Float[Array, "*B H V"],
    product: Float[Array, "*B H K V"],
    flux: ResonanceFlux,
) -> Float[Array, "*B H"]:
    """psi of a chunk, from the means over its tokens of the keys, the values, and the outer products `k v^T`.

    The mean of the scores `k^T W v / temperature` is the sum over `W` times the mean outer product.
    """
    score = jnp.einsum(
        "...hkv,hkv->...h", product, flux.bilinear.astype(product.dtype), precision=lax.Precision.HIGHEST
    )
    score = score / flux.temperature.astype(product.dtype)
    return _flux(flux.chunk, key, value, score[..., None])


def _flux(weights: Perceptron, *features: Array) -> Array:
    """Flux of features in several arrays, as if they were concatenated."""
    w1, b1, w2, b2 = (w.astype(features[0].dtype) for w in weights)
    hidden, start = b1, 0
    for x in features:
        part = w1[:, start : start + x.shape[-1]]
        hidden = hidden + jnp.einsum("...d,fd->...f", x, part, precision=lax.Precision.HIGHEST)
        start += x.shape[-1]
    out = jnp.einsum("...f,f->...", jax.nn.silu(hidden), w2[0], precision=lax.Precision.HIGHEST) + b2[0]
    return jnp.clip(jax.nn.sigmoid(out), LOWEST, HIGHEST)
