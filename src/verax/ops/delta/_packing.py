"""From tokens to chunks and back, so that a packed sequence always starts a chunk. Shapes are static; nothing waits.

A sequence is cut as it would be alone, so its result is the same packed or not, bit for bit as far as XLA allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

__all__ = ["Layout", "align"]


@dataclass(frozen=True)
class Layout:
    """Positions of tokens in chunks. The slots left over hold zeros, which leave any state as it is."""

    tokens: int
    chunks: int
    size: int
    batch: int
    owner: Int[Array, "n"]
    """Packed sequence of each chunk, N or more for an unused chunk; 0 where nothing is packed."""
    source: Int[Array, "slots"] | None
    """Token in each slot, `tokens` for none; None where nothing is packed."""
    slot: Int[Array, "T"] | None
    """Slot of each token, past the end for tokens of no sequence."""

    def to_chunks(self, x: Array) -> Array:
        """`[B, T, ...]` to `[n, B, C, ...]`."""
        if self.source is None:
            x = jnp.pad(x, [(0, 0), (0, self.chunks * self.size - self.tokens)] + [(0, 0)] * (x.ndim - 2))
        else:
            x = x.at[:, self.source].get(mode="fill", fill_value=0)
        return jnp.moveaxis(x.reshape(self.batch, self.chunks, self.size, *x.shape[2:]), 1, 0)

    def from_chunks(self, x: Array) -> Array:
        """`[n, B, C, ...]` to `[B, T, ...]`; zeros for tokens of no sequence."""
        x = jnp.moveaxis(x, 0, 1).reshape(self.batch, self.chunks * self.size, *x.shape[3:])
        if self.slot is None:
            return x[:, : self.tokens]
        return x.at[:, self.slot].get(mode="fill", fill_value=0)


def align(batch: int, tokens: int, size: int, cu_seqlens: Int[Array, "M"] | None) -> Layout:
    """Cut `tokens` tokens into chunks of `size`, each packed sequence from a chunk of its own."""
    if cu_seqlens is None:
        chunks = -(-tokens // size)
        return Layout(tokens, chunks, size, batch, jnp.zeros((chunks,), jnp.int32), None, None)
    sequences = cu_seqlens.shape[0] - 1
    lengths = jnp.diff(cu_seqlens)
    first = jnp.concatenate([jnp.zeros_like(lengths[:1]), jnp.cumsum(-(-lengths // size))])
    # Each sequence may leave all but one slot of its last chunk empty: that bounds the sum of the rounded lengths.
    chunks = (tokens + sequences * (size - 1)) // size
    owner = jnp.searchsorted(first, jnp.arange(chunks), side="right") - 1
    of = jnp.minimum(owner, sequences - 1)
    position = (jnp.arange(chunks) - first[of])[:, None] * size + jnp.arange(size)
    used = (position < lengths[of][:, None]) & (owner < sequences)[:, None]
    source = jnp.where(used, cu_seqlens[of][:, None] + position, tokens).reshape(-1)
    token = jnp.arange(tokens)
    sequence = jnp.searchsorted(cu_seqlens, token, side="right") - 1
    of = jnp.minimum(sequence, sequences - 1)
    slot = jnp.where(sequence < sequences, first[of] * size + token - cu_seqlens[of], chunks * size)
    return Layout(tokens, chunks, size, batch, owner, source, slot)
