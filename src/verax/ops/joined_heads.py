"""Attention with heads of keys and values joined: m heads of size H lie side by side as one of size m H.

A register of a TPU has 128 numbers side by side. A head of 64 fills half of one, two joined heads fill it. A query has
zeros beside the heads that are not its own, so that its scores are those of its own head:

    [q 0] . [k0 k1] = q . k0        [0 q] . [k0 k1] = q . k1

Its result holds the values of all m heads, of which its own part is taken. An implementation sees fewer, larger heads
with m times as many queries each. A key that is not finite makes NaN of the scores of the heads beside it as well.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["heads_to_join", "join_heads", "own_results", "spread_queries"]

JOINED = {32: 4, 64: 2}
"""Heads that fill a register, by their size."""


def heads_to_join(H: int) -> int:
    """Heads of size H that fill a register together; 1 of a size that is not joined."""
    return JOINED.get(H, 1)


def join_heads(x: Float[Array, "*B K H"], m: int) -> Float[Array, "*B J W"]:
    """Keys or values with each m heads as one."""
    return x.reshape(*x.shape[:-2], -1, m * x.shape[-1])


def spread_queries(q: Float[Array, "*B N H"], K: int, m: int) -> Float[Array, "*B N W"]:
    """Queries for joined heads: zeros beside the heads that are not theirs.

    Args:
        q: queries, head n of them for key/value head `n // (N / K)`.
        K: heads of keys and values before they were joined.
        m: joined heads.
    """
    *lead, N, H = q.shape
    own = jnp.eye(m, dtype=bool)[:, None, :, None]
    spread = jnp.where(own, q.reshape(*lead, K // m, m, N // K, 1, H), 0)
    return spread.reshape(*lead, N, m * H)


def own_results(out: Float[Array, "*B N W"], K: int, m: int) -> Float[Array, "*B N H"]:
    """Each query's part of a result with joined heads; arguments as in `spread_queries`."""
    *lead, N, joined = out.shape
    parts = out.reshape(*lead, K // m, m, N // K, m, joined // m)
    return jnp.stack([parts[..., i, :, i, :] for i in range(m)], axis=-3).reshape(*lead, N, joined // m)
