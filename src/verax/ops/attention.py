"""Softmax attention over whole sequences (Vaswani et al., 2017, arXiv:1706.03762), with grouped key/value heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import operation

__all__ = ["attention"]

MASKED = -1e30
"""A score that no softmax notices. Not -inf: a row with nothing to attend to must not become NaN."""


@operation
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    segments: Int[Array, "B T"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of T queries over S keys; query head n reads key/value head `n // (N / K)`. Float32 out.

    Scores and softmax are float32; both products take inputs of the dtype of `k`. Memory is `O(B N T S)`.

    Args:
        q, k, v: queries, keys and values.
        causal: query t sees keys up to `t + S - T`.
        segments: for packed sequences (T == S): a query sees the keys of its own segment only.
        scale: factor on the scores; `H ** -0.5` if None.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    grouped = (q * (H**-0.5 if scale is None else scale)).astype(k.dtype).reshape(B, T, K, N // K, H)
    scores = jnp.einsum(
        "btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32, precision=exact_products(k)
    )
    visible = jnp.ones((B, T, S), bool)
    if causal:
        visible &= jnp.arange(S)[None, None, :] <= jnp.arange(T)[None, :, None] + (S - T)
    if segments is not None:
        visible &= segments[:, :, None] == segments[:, None, :]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), axis=-1)
    out = jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=exact_products(v)
    )
    return out.reshape(B, T, N, H)


def exact_products(x: Array) -> jax.lax.Precision | None:
    """Exact products for float32 operands: elsewhere than on a CPU, XLA's default would round them."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
