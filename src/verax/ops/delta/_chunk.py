"""The recurrence a chunk at a time: inside a chunk everything is matmuls over all chunks at once; one small affine
update of the state a chunk is all that runs in sequence (Yang et al., 2024, arXiv:2406.06484 and arXiv:2412.06464).

With G the cumulative log decay of a chunk that starts from state S, and L and P the lower triangular products

    L[i, j] = beta_i  erase_i . write_j  exp(G_i - G_j)    (j < i)
    P[i, j] =         read_i  . write_j  exp(G_i - G_j)    (j <= i)

what the tokens write is `Z = (I + L)^-1 beta (v - (erase exp(G)) S)`, the outputs are `(read exp(G)) S + P Z`, and the
next chunk starts from `exp(G_C) S + (write exp(G_C - G))^T Z`. Decays by channel stand inside the dot products.

Axes: `[n m C D]` and `[n m R C D]` for n chunks, m = B H batches and key heads, R value heads of each key head.

A packed sequence always starts a chunk: it is cut as it would be alone, so its result is the same packed or not, bit
for bit as far as XLA allows. Shapes are static, and nothing waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from verax.ops._target import target
from verax.ops.delta._decay import LogDecay, decayed_products
from verax.ops.delta._inputs import DeltaInputs, RecurrenceOptions
from verax.ops.delta._recurrence import delta_recurrence, is_step
from verax.ops.delta._scan import Chunk, advance, delta_chunk_scan, delta_chunk_scan_backward, matmul

CHUNK_SIZES = {"cpu": 16}
"""Best chunk size by platform, measured (docs/delta.md); `CHUNK_SIZE` elsewhere."""

CHUNK_SIZE = 64

SMALLEST_CHUNK = 16


@delta_recurrence.implementation("chunk")
def _delta_chunk(
    x: DeltaInputs,
    initial_state: Float[Array, "N HV K V"],
    cu_seqlens: Int[Array, "M"] | None = None,
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"]]:
    layout, chunks = _cut(x, cu_seqlens, **options)
    early = options.get("erase_before_decay", False)
    out, states = _walk(chunks, _by_heads(initial_state, x), layout.owner, early)
    return _from_chunks(out, layout), states.reshape(initial_state.shape)


def chunk_forward(
    x: DeltaInputs,
    initial_state: Float[Array, "N HV K V"],
    cu_seqlens: Int[Array, "M"] | None,
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"], Float[Array, "n B HV K V"]]:
    """Results of the chunked implementation and, for `chunk_backward`, the state before each chunk."""
    layout, chunks = _cut(x, cu_seqlens, **options)
    early = options.get("erase_before_decay", False)
    (out, states), (*_, before) = _walk_forward(chunks, _by_heads(initial_state, x), layout.owner, early)
    before = before.reshape(layout.chunks, layout.batch, *initial_state.shape[1:])
    return _from_chunks(out, layout), states.reshape(initial_state.shape), before


def chunk_backward(
    x: DeltaInputs,
    before: Float[Array, "n B HV K V"],
    cu_seqlens: Int[Array, "M"] | None,
    d_out: Float[Array, "B T HV V"],
    d_final: Float[Array, "N HV K V"],
    **options: Unpack[RecurrenceOptions],
) -> tuple[DeltaInputs, Float[Array, "N HV K V"]]:
    """Cotangents of the inputs and of the initial states."""
    layout = chunk_layout(x, cu_seqlens, options.get("chunk_size"))
    chunks, pull_inputs = jax.vjp(lambda x: _to_chunks(x.ready(**options), layout), x)
    residuals = chunks, layout.owner, _by_heads(before, x)
    cotangents = _value_heads(d_out, layout, x.read.shape[2]), _by_heads(d_final, x)
    d_chunks, d_initial, _ = _walk_backward(options.get("erase_before_decay", False), residuals, cotangents)
    return pull_inputs(d_chunks)[0], d_initial.reshape(d_final.shape)


def _cut(
    x: DeltaInputs, cu_seqlens: Int[Array, "M"] | None, *, chunk_size: int | None = None, **options: Any
) -> tuple[Layout, DeltaInputs]:
    """Layout of the tokens in chunks, and the inputs by chunk."""
    layout = chunk_layout(x, cu_seqlens, chunk_size)
    return layout, _to_chunks(x.ready(**options), layout)


def chunk_layout(x: DeltaInputs, cu_seqlens: Int[Array, "M"] | None, chunk_size: int | None) -> Layout:
    """Layout of the inputs' tokens in chunks; `chunk_size` is the target platform's best if None."""
    B, T = x.v.shape[:2]
    if chunk_size is None:
        # No larger than the first power of two that holds all tokens.
        chunk_size = min(CHUNK_SIZES.get(target().platform, CHUNK_SIZE), 1 << (max(T, 1) - 1).bit_length())
        chunk_size = max(chunk_size, SMALLEST_CHUNK)
    return align(B, T, chunk_size, cu_seqlens)


def _by_heads(states: Float[Array, "*N HV K V"], x: DeltaInputs) -> Float[Array, "S m R K V"]:
    """States with the value heads of a key head next to each other."""
    B, _, H, _ = x.read.shape
    return states.reshape(-1, B * H, x.v.shape[2] // H, *states.shape[-2:])


def _value_heads(a: Float[Array, "B T HV D"], layout: Layout, H: int) -> Float[Array, "n m R C D"]:
    a = jnp.moveaxis(layout.to_chunks(a), 3, 2)
    return a.reshape(layout.chunks, layout.batch * H, a.shape[2] // H, *a.shape[3:])


def _to_chunks(x: DeltaInputs, layout: Layout) -> DeltaInputs:
    """Key heads as `[n m C K]`, value heads as `[n m R C D]`; beta and a decay by head have D = 1."""
    H = x.read.shape[2]
    keys = (_value_heads(a, layout, H)[:, :, 0] for a in x[:3])
    values = (_value_heads(a if a.ndim == 4 else a[..., None], layout, H) for a in x[3:])
    return DeltaInputs(*keys, *values)


def _from_chunks(out: Float[Array, "n m R C V"], layout: Layout) -> Float[Array, "B T HV V"]:
    n, m, R, C, V = out.shape
    out = out.reshape(n, layout.batch, m // layout.batch * R, C, V)
    return layout.from_chunks(jnp.moveaxis(out, 3, 2))


def _walk_all(x: DeltaInputs, states: Array, owner: Array, erase_before_decay: bool) -> tuple[Array, Array]:
    """Outputs `[n m R C V]` and final states, from chunked inputs and the initial state of every sequence."""
    out, final, _ = delta_chunk_scan(_prepare(x, erase_before_decay), states, owner)
    return out, final


def _walk_forward(x: DeltaInputs, states: Array, owner: Array, erase_before_decay: bool) -> tuple[tuple, tuple]:
    """`_walk_all`, keeping the state before each chunk."""
    out, final, before = delta_chunk_scan(_prepare(x, erase_before_decay), states, owner, keep_states=True)
    return (out, final), (x, owner, before)


def _walk_backward(erase_before_decay: bool, residuals: tuple, cotangents: tuple) -> tuple:
    """Chunks are made again from their inputs; one reverse walk finds each chunk's share in the later states."""
    x, owner, before = residuals
    d_out, d_final = cotangents
    chunks, pull_prepare = jax.vjp(lambda x: _prepare(x, erase_before_decay), x)
    d_initial, d_next = delta_chunk_scan_backward(chunks, d_final, owner, d_out)
    _, pull_advance = jax.vjp(lambda chunks: advance(chunks, before), chunks)
    return *pull_prepare(*pull_advance((d_next, d_out))), d_initial, None


_walk = jax.custom_vjp(_walk_all, nondiff_argnums=(3,))
_walk.defvjp(_walk_forward, _walk_backward)


def _prepare(x: DeltaInputs, erase_before_decay: bool) -> Chunk:
    """Everything that the inputs alone determine."""
    decay = LogDecay.summed(x.g)
    erased = decay.before() if erase_before_decay else decay
    lower = x.beta * decayed_products(x.erase, x.write, erased, decay, diagonal=False)
    inverse = unit_lower_inverse(lower)
    end = decay.rows(-1, None)

    def grouped(key: Array) -> Array:
        return key[..., None, :, :]

    return Chunk(
        value=matmul(inverse, x.beta * x.v),
        erase=matmul(inverse, x.beta * grouped(x.erase) * jnp.exp(erased.since_start())),
        write=grouped(x.write) * jnp.exp(end.since(decay)),
        keep=jnp.exp(end.since_start())[..., 0, :],
        read=grouped(x.read) * jnp.exp(decay.since_start()),
        inner=decayed_products(x.read, x.write, decay, decay, diagonal=True),
    )


@dataclass(frozen=True)
class Layout:
    """Positions of tokens in chunks. The slots left over hold zeros, which leave any state unchanged."""

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


# The matrices of the delta rule (`I + L`, L from products of keys) have small inverses but large powers when keys
# repeat: Neumann series, repeated doubling and Newton's iteration multiply those powers and lose every digit. Here
# inverses of diagonal blocks are joined pairwise, as in blocked substitution, by products of small matrices only.
@jax.custom_jvp
def unit_lower_inverse(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """`(I + lower)^-1` for strictly lower triangular matrices; C is a power of two.

    With X the inverse of the diagonal blocks of size b, and S the blocks of `lower` that couple the odd blocks to the
    even ones before them, `X - X S X` is the inverse of the diagonal blocks of size 2b.
    """
    C = lower.shape[-1]
    inverse = jnp.eye(C, dtype=lower.dtype) - jnp.where(_couples(C, 0), lower, 0.0)
    for level in range(1, int(math.log2(C))):
        step = jnp.where(_couples(C, level), lower, 0.0)
        inverse = inverse - matmul(inverse, matmul(step, inverse))
    return inverse


def _couples(C: int, level: int) -> np.ndarray:
    """Mask of the rows of odd blocks of size `2^level` and the columns of the block before."""
    block = np.arange(C) >> level
    return (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)


@unit_lower_inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -matmul(inverse, matmul(jnp.tril(tangents[0], -1), inverse))


# One decode step: few tokens, unrolled, with one product of both keys with the state each. It is registered after the
# chunked implementation, so that it is preferred.
@delta_recurrence.implementation("step", accepts=is_step)
def _delta_step(
    x: DeltaInputs,
    initial_state: Float[Array, "N HV K V"],
    cu_seqlens: Int[Array, "M"] | None = None,
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"]]:
    x, early = x.ready(**options), options.get("erase_before_decay", False)
    B, T, HV, V = x.v.shape
    H, K = x.read.shape[2:]
    state = initial_state.reshape(B, H, HV // H, K, V)
    outs = []
    for t in range(T):
        read, erase, write = (key[:, t, :, None] for key in x[:3])
        v, beta, g = (a[:, t].reshape(B, H, HV // H, -1) for a in x[3:])
        decay = jnp.exp(g)
        # Both keys read the old state at once; the output follows without reading the new one.
        keys = jnp.stack(jnp.broadcast_arrays(erase if early else erase * decay, read * decay), axis=-2)
        stored = jnp.einsum("bhrmk,bhrkv->bhrmv", keys, state, precision=lax.Precision.HIGHEST)
        written = beta * (v - stored[..., 0, :])
        outs.append(stored[..., 1, :] + jnp.sum(read * write, axis=-1, keepdims=True) * written)
        state = decay[..., None] * state + write[..., None] * written[..., None, :]
    return jnp.stack(outs, axis=1).reshape(x.v.shape), state.reshape(initial_state.shape)
