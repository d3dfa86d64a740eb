"""The recurrence a chunk at a time: inside a chunk everything is matmuls over all chunks at once; one small affine
update of the state a chunk is all that runs in sequence (Yang et al., 2024, arXiv:2406.06484 and arXiv:2412.06464).

With G the cumulative log decay of a chunk that starts from state S, and L and P the lower triangular products

    L[i, j] = beta_i  erase_i . write_j  exp(G_i - G_j)    (j < i)
    P[i, j] =         read_i  . write_j  exp(G_i - G_j)    (j <= i)

what the tokens write is `Z = (I + L)^-1 beta (v - (erase exp(G)) S)`, the outputs are `(read exp(G)) S + P Z`, and the
next chunk starts from `exp(G_C) S + (write exp(G_C - G))^T Z`. Decays by channel stand inside the dot products.

Axes: `[n m C D]` and `[n m R C D]` for n chunks, m = B H batches and key heads, R value heads of each key head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops._target import target
from verax.ops.delta._decay import LogDecay, decayed_products
from verax.ops.delta._inputs import DeltaInputs
from verax.ops.delta._inverse import unit_lower_inverse
from verax.ops.delta._packing import Layout, align
from verax.ops.delta._recurrence import delta_recurrence
from verax.ops.delta._scan import Chunk, advance, delta_chunk_scan, delta_chunk_scan_backward, matmul

__all__ = ["SMALLEST_CHUNK", "chunk_backward", "chunk_forward", "chunk_layout"]

CHUNK_SIZES = {"cpu": 16}
"""Best chunk size by platform, measured (docs/delta.md); `CHUNK_SIZE` elsewhere."""

CHUNK_SIZE = 64

SMALLEST_CHUNK = 16


@delta_recurrence.implementation("chunk")
def _delta_chunk(
    x: DeltaInputs,
    initial_state: Float[Array, "N HV K V"],
    cu_seqlens: Int[Array, "M"] | None = None,
    *,
    scale: float | Array = 1.0,
    use_qk_l2norm: bool = False,
    erase_before_decay: bool = False,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"]]:
    layout = chunk_layout(x.v.shape[0], x.v.shape[1], cu_seqlens, chunk_size)
    chunks = _to_chunks(x.ready(scale, use_qk_l2norm), layout)
    out, states = _walk(chunks, _by_heads(initial_state, x), layout.owner, erase_before_decay)
    return _from_chunks(out, layout), states.reshape(initial_state.shape)


def chunk_forward(
    x: DeltaInputs,
    initial_state: Float[Array, "N HV K V"],
    cu_seqlens: Int[Array, "M"] | None,
    *,
    scale: float,
    use_qk_l2norm: bool,
    erase_before_decay: bool,
    chunk_size: int | None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"], Float[Array, "n B HV K V"]]:
    """Results of the chunked implementation and, for `chunk_backward`, the state before each chunk."""
    layout = chunk_layout(x.v.shape[0], x.v.shape[1], cu_seqlens, chunk_size)
    chunks = _to_chunks(x.ready(scale, use_qk_l2norm), layout)
    (out, states), (*_, before) = _walk_forward(chunks, _by_heads(initial_state, x), layout.owner, erase_before_decay)
    before = before.reshape(layout.chunks, layout.batch, *initial_state.shape[1:])
    return _from_chunks(out, layout), states.reshape(initial_state.shape), before


def chunk_backward(
    x: DeltaInputs,
    before: Float[Array, "n B HV K V"],
    cu_seqlens: Int[Array, "M"] | None,
    d_out: Float[Array, "B T HV V"],
    d_final: Float[Array, "N HV K V"],
    *,
    scale: float,
    use_qk_l2norm: bool,
    erase_before_decay: bool,
    chunk_size: int | None,
) -> tuple[DeltaInputs, Float[Array, "N HV K V"]]:
    """Cotangents of the inputs and of the initial states."""
    layout = chunk_layout(x.v.shape[0], x.v.shape[1], cu_seqlens, chunk_size)
    chunks, pull_inputs = jax.vjp(lambda x: _to_chunks(x.ready(scale, use_qk_l2norm), layout), x)
    residuals = chunks, layout.owner, _by_heads(before, x)
    cotangents = _value_heads(d_out, layout, x.read.shape[2]), _by_heads(d_final, x)
    d_chunks, d_initial, _ = _walk_backward(erase_before_decay, residuals, cotangents)
    return pull_inputs(d_chunks)[0], d_initial.reshape(d_final.shape)


def chunk_layout(B: int, T: int, cu_seqlens: Int[Array, "M"] | None, chunk_size: int | None) -> Layout:
    """Layout of T tokens in chunks; `chunk_size` is the target platform's best if None."""
    if chunk_size is None:
        # No larger than the first power of two that holds all tokens.
        chunk_size = min(CHUNK_SIZES.get(target().platform, CHUNK_SIZE), 1 << (max(T, 1) - 1).bit_length())
        chunk_size = max(chunk_size, SMALLEST_CHUNK)
    return align(B, T, chunk_size, cu_seqlens)


def _by_heads(states: Float[Array, "*N HV K V"], x: DeltaInputs) -> Float[Array, "S m R K V"]:
    """States with the value heads of a key head beside each other."""
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
    end = decay.last()

    def grouped(key: Array) -> Array:
        return key[..., None, :, :]

    return Chunk(
        value=matmul(inverse, x.beta * x.v),
        found=matmul(inverse, x.beta * grouped(x.erase) * jnp.exp(erased.since_start())),
        write=grouped(x.write) * jnp.exp(end.since(decay)),
        keep=jnp.exp(end.since_start())[..., 0, :],
        read=grouped(x.read) * jnp.exp(decay.since_start()),
        inner=decayed_products(x.read, x.write, decay, decay, diagonal=True),
    )
