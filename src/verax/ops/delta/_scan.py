"""The scan over chunks and its gradient: what runs in sequence of the chunked recurrence (`_chunk.py` has the rest).

Axes: `[n m R C D]` for n chunks, m = B H batches and key heads, R value heads of each key head, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import Example, differentiated_as, float32, int32, operation


class Chunk(NamedTuple):
    """Inputs of the scan over chunks that do not depend on the state. Leading axes n m R."""

    value: Float[Array, "*B C V"]
    """Values that the tokens write if the chunk starts from a zero state."""
    erase: Float[Array, "*B C K"]
    """Keys that read the state: the tokens write Z = value - erase S."""
    write: Float[Array, "*B C K"]
    keep: Float[Array, "*B D"]
    """Decay over the whole chunk, D being 1 or K."""
    read: Float[Array, "*B C K"]
    inner: Float[Array, "*B C C"]


@operation
def delta_chunk_scan(
    chunks: Chunk, states: Float[Array, "N m R K V"], owner: Int[Array, "n"], *, keep_states: bool = False
) -> tuple[Float[Array, "n m R C V"], Float[Array, "N m R K V"], Float[Array, "n m R K V"] | None]:
    """Outputs, final states, and with `keep_states` the state before each chunk: one chunk after the other

        Z = value - erase S;  out = read S + inner Z;  S <- keep S + write^T Z

    Args:
        chunks: what the inputs alone determine, in the dtype of the states.
        owner: sequence of each chunk, ascending; N or more for an unused chunk, whose inputs are zeros.
        keep_states: return the states before the chunks, which a backward pass needs.
    """

    # Like the token walk, this one carries every sequence's state: a chunk takes its own sequence's. One that nobody
    # uses takes the last sequence's and leaves it unchanged, its inputs being zeros.
    def body(states: Array, step: tuple[Chunk, Array]) -> tuple[Array, tuple[Array, Array | None]]:
        chunk, n = step
        before = _take(states, n)
        state, out = advance(chunk, before)
        return _put(states, state, n), (out, before if keep_states else None)

    final, (out, before) = lax.scan(body, states, (chunks, owner))
    return out, final, before


@operation
def delta_chunk_scan_backward(
    chunks: Chunk, d_final: Float[Array, "N m R K V"], owner: Int[Array, "n"], d_out: Float[Array, "n m R C V"]
) -> tuple[Float[Array, "N m R K V"], Float[Array, "n m R K V"]]:
    """Cotangents of the initial states, and of the state after each chunk: from the last chunk to the first

        Y = inner^T d_out + write dS;  dS <- keep dS + read^T d_out - erase^T Y

    `d_out`: cotangents of the outputs, zeros for an unused chunk.
    """
    # The part that does not pass through the next state, all chunks at once.
    direct = matmul_tn(chunks.read, d_out) - matmul_tn(chunks.erase, matmul_tn(chunks.inner, d_out))

    def body(d_states: Array, step: tuple[Chunk, Array, Array]) -> tuple[Array, Array]:
        chunk, direct, n = step
        d_next = _take(d_states, n)
        d_state = direct + chunk.keep[..., None] * d_next - matmul_tn(chunk.erase, matmul(chunk.write, d_next))
        return _put(d_states, d_state, n), d_next

    return lax.scan(body, d_final, (chunks, direct, owner), reverse=True)


def _examples() -> list[Example]:
    """Chunks, states, owners and cotangents of the outputs of 128 tokens, as shapes."""
    heads, C, K, V = (2, 16, 2), 64, 128, 128
    key, value = float32(*heads, C, K), float32(*heads, C, V)
    chunks = Chunk(value, key, key, float32(*heads, 1), key, float32(*heads, C, C))
    arrays = chunks, float32(1, *heads[1:], K, V), int32(2), value
    return [Example(arrays[:3], label="128 tokens"), Example(arrays, label="128 tokens")]


delta_chunk_scan.examples, delta_chunk_scan_backward.examples = ([example] for example in _examples())


# Kernels walk over the chunks of a head with its state, or the cotangent of its state, in registers. One function runs
# either walk: it takes its name, chunks, input of each sequence, owners and the sizes of the results of a chunk, and
# returns the results of the sequences and of the chunks.
Walk = Callable[..., tuple[Array, list[Array]]]


def scan_by(
    walk: Walk, chunks: Chunk, states: Float[Array, "N m R K V"], owner: Int[Array, "n"], *, keep_states: bool = False
) -> tuple[Float[Array, "n m R C V"], Float[Array, "N m R K V"], Float[Array, "n m R K V"] | None]:
    """`delta_chunk_scan` by a kernel, in float32."""
    sizes = [chunks.value.shape[-2:], states.shape[-2:]][: 2 if keep_states else 1]
    final, (out, *before) = walk("delta_chunk_scan", chunks, states, owner, sizes)
    return out, final, before[0] if keep_states else None


def scan_backward_by(
    walk: Walk,
    chunks: Chunk,
    d_final: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    d_out: Float[Array, "n m R C V"],
) -> tuple[Float[Array, "N m R K V"], Float[Array, "n m R K V"]]:
    """`delta_chunk_scan_backward` by a kernel, in float32, which finds the cotangents of outputs in `chunks.value`."""
    chunks = chunks._replace(value=d_out)
    d_initial, (d_next,) = walk("delta_chunk_scan_backward", chunks, d_final, owner, [d_final.shape[-2:]])
    return d_initial, d_next


def register_scans(name: str, walk: Walk, accepts: Callable[..., bool], **properties: Any) -> None:
    """Register a kernel as an implementation of the scan and of its gradient; the properties are `Implementation`'s.

    No device has timed one of the gradient, so that those are chosen by name.
    """

    @delta_chunk_scan.implementation(name, accepts=accepts, **properties)
    def delta_chunk_scan_kernel(
        chunks: Chunk, states: Array, owner: Array, *, keep_states: bool = False
    ) -> tuple[Array, Array, Array | None]:
        reference = partial(delta_chunk_scan.reference, keep_states=keep_states)
        return differentiated_as(reference, partial(scan_by, walk, keep_states=keep_states), chunks, states, owner)

    @delta_chunk_scan_backward.implementation(name, accepts=accepts, **properties | {"experimental": True})
    def delta_chunk_scan_backward_kernel(
        chunks: Chunk, d_final: Array, owner: Array, d_out: Array
    ) -> tuple[Array, Array]:
        reference, kernel = delta_chunk_scan_backward.reference, partial(scan_backward_by, walk)
        return differentiated_as(reference, kernel, chunks, d_final, owner, d_out)


def takes_scan(chunks: Chunk, states: Any) -> bool:
    """True for arrays of float32 with anything in them, which is what kernels take."""
    float32 = all(x.dtype == jnp.float32 for x in (*chunks, states))
    return float32 and chunks.value.size > 0 and states.size > 0


def advance(chunk: Chunk, state: Float[Array, "*B K V"]) -> tuple[Float[Array, "*B K V"], Float[Array, "*B C V"]]:
    """State after a chunk, or after each of many, and the outputs."""
    written = chunk.value - matmul(chunk.erase, state)
    out = matmul(chunk.read, state) + matmul(chunk.inner, written)
    return chunk.keep[..., None] * state + matmul_tn(chunk.write, written), out


def _take(states: Float[Array, "N *B"], n: Int[Array, ""]) -> Float[Array, "*B"]:
    """State of sequence n, or of the last one if n is past the end."""
    return lax.dynamic_index_in_dim(states, n, keepdims=False)


def _put(states: Float[Array, "N *B"], state: Float[Array, "*B"], n: Int[Array, ""]) -> Float[Array, "N *B"]:
    """States with the state of sequence n replaced."""
    return lax.dynamic_update_index_in_dim(states, state, n, axis=0)


def matmul(a: Float[Array, "*B i j"], b: Float[Array, "*B j k"]) -> Float[Array, "*B i k"]:
    """`a b`, float32 products exact elsewhere than on a CPU too."""
    return jnp.einsum("...ij,...jk->...ik", a, b, precision=lax.Precision.HIGHEST)


def matmul_tn(a: Float[Array, "*B j i"], b: Float[Array, "*B j k"]) -> Float[Array, "*B i k"]:
    """`a^T b`."""
    return jnp.einsum("...ji,...jk->...ik", a, b, precision=lax.Precision.HIGHEST)
