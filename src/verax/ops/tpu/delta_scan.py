"""The delta rule's scan over chunks and its gradient for TPUs in Pallas.

    for each few heads:
        for each chunk:
            S <- the initial state, if the chunk is a sequence's first
            Z = value - found S;  out = read S + inner Z;  S <- keep S + write^T Z
            the final state <- S, if it is the sequence's last

The gradient goes from the last chunk to the first, with a state's cotangent in the place of the state.

So the state stays in vector memory from a sequence's first chunk to its last, and a chunk's inputs are copied while the
chunk before it is multiplied. Products of one head wait for each other, but not for another head's. The state lies
transposed, so that a decay by channel is a row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import differentiated_as
from verax.ops.delta._scan import Chunk, delta_chunk_scan, delta_chunk_scan_backward
from verax.ops.tpu import pl, pltpu, product

__all__ = ["chunk_scan", "chunk_scan_backward", "heads_of_step"]

MAX_HEADS = 8
"""Heads that are multiplied together."""

MEMORY = 12 << 20
"""Bytes of the 16 MiB of vector memory that XLA gives to a kernel, for arrays that are copied, two buffers each."""


def heads_of_step(heads: int, C: int, K: int, V: int) -> int:
    """Heads that are multiplied together: as many as there is vector memory for, with the states before chunks."""
    numbers = C * (2 * V + 3 * K + max(C, 128)) + 3 * K * V
    return max(1, min(heads, MAX_HEADS, MEMORY // (2 * 4 * numbers + 4 * K * V)))


def chunk_scan(
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    *,
    keep_states: bool = False,
    interpret: Any = False,
) -> tuple[Float[Array, "n m R C V"], Float[Array, "N m R K V"], Float[Array, "n m R K V"] | None]:
    """`ops.delta.delta_chunk_scan`, in float32; with `interpret` as `pallas_call` takes it."""
    by_chunk = [chunks.value.shape[-2:], states.shape[-2:]][: 2 if keep_states else 1]
    final, (out, *before) = _run(_kernel, "delta_chunk_scan", chunks, states, owner, by_chunk, interpret=interpret)
    return out, final, before[0] if keep_states else None


def chunk_scan_backward(
    chunks: Chunk,
    d_final: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    d_out: Float[Array, "n m R C V"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "N m R K V"], Float[Array, "n m R K V"]]:
    """`ops.delta.delta_chunk_scan_backward`, in float32; with `interpret` as `pallas_call` takes it."""
    given, name = chunks._replace(value=d_out), "delta_chunk_scan_backward"
    by_chunk = [d_final.shape[-2:]]
    d_initial, (d_next,) = _run(
        _backward_kernel, name, given, d_final, owner, by_chunk, backward=True, interpret=interpret
    )
    return d_initial, d_next


def _run(
    kernel: Callable[..., None],
    name: str,
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    by_chunk: Sequence[tuple[int, ...]],
    *,
    backward: bool = False,
    interpret: Any,
) -> tuple[Float[Array, "N m R K V"], list[Float[Array, "n m R _ V"]]]:
    """Results of a kernel that walks over the chunks: one for each sequence, and those for each chunk.

    Args:
        kernel: the kernel.
        name: its name in the compiled program.
        chunks: inputs of the chunks.
        states: a sequence's input, as large as its result.
        owner: sequence of each chunk.
        by_chunk: sizes of each result of a chunk, by head.
        backward: from the last chunk to the first.
        interpret: as `pallas_call` takes it.
    """
    (n, m, R, C, V), (N, *_, K, _) = chunks.value.shape, states.shape
    heads = m * R
    together = heads_of_step(heads, C, K, V)

    def chunk_at(i: Any) -> Any:
        return n - 1 - i if backward else i

    def of_chunk(*size: int) -> Any:
        return pl.BlockSpec((1, together, *size), lambda h, i, owner: (chunk_at(i), h, 0, 0))

    of_sequence = pl.BlockSpec((1, together, K, V), lambda h, i, owner: (owner[chunk_at(i)], h, 0, 0))
    shapes = [(N, heads, K, V), *((n, heads, *size) for size in by_chunk)]
    inputs = [x.reshape(n, heads, *x.shape[3:]) for x in chunks._replace(keep=chunks.keep[..., None, :])]
    run = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(heads, together), n),
            in_specs=[of_sequence, *(of_chunk(*x.shape[2:]) for x in inputs)],
            out_specs=[of_sequence, *(of_chunk(*size) for size in by_chunk)],
            scratch_shapes=[pltpu.VMEM((together, V, K), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name=name,
    )
    owner = jnp.minimum(owner, N - 1).astype(jnp.int32)  # unused chunks leave the last sequence's state as it is
    after, *results = run(owner, states.reshape(shapes[0]), *inputs)
    return _where_chunks(owner, after, states), [a.reshape(n, m, R, *a.shape[2:]) for a in results]


def _where_chunks(owner: Int[Array, "n"], after: Array, before: Float[Array, "N m R K V"]) -> Float[Array, "N m R K V"]:
    """States that the kernel wrote, and those before for sequences without chunks."""
    has_chunks = jnp.zeros(before.shape[0], bool).at[owner].set(True)[:, None, None, None, None]
    return jnp.where(has_chunks, after.reshape(before.shape), before)


def _is_first(owner: Any, i: Any) -> Any:
    """True for the first chunk of a sequence."""
    return (i == 0) | (owner[jnp.maximum(i - 1, 0)] != owner[i])


def _is_last(owner: Any, i: Any) -> Any:
    """True for the last chunk of a sequence."""
    end = owner.shape[0] - 1
    return (i == end) | (owner[jnp.minimum(i + 1, end)] != owner[i])


def _kernel(owner: Any, initial: Any, *refs: Any) -> None:
    chunk: Any = Chunk(*refs[:6])
    final, out, *before, state = refs[6:]
    i = pl.program_id(1)
    heads = range(state.shape[0])

    @pl.when(_is_first(owner, i))
    def _() -> None:
        for h in heads:
            state[h] = initial[0, h].T

    for ref in before:
        for h in heads:
            ref[0, h] = state[h].T

    for h in heads:
        written = chunk.value[0, h] - product(chunk.found[0, h], state[h], (1, 1))
        out[0, h] = product(chunk.read[0, h], state[h], (1, 1)) + product(chunk.inner[0, h], written)
        state[h] = chunk.keep[0, h] * state[h] + product(written, chunk.write[0, h], (0, 0))

    @pl.when(_is_last(owner, i))
    def _() -> None:
        for h in heads:
            final[0, h] = state[h].T


def _backward_kernel(owner: Any, d_final: Any, *refs: Any) -> None:
    *inputs, d_initial, d_next, d_state = refs
    chunk: Any = Chunk(*inputs)  # with the cotangents of outputs in the place of values
    i = owner.shape[0] - 1 - pl.program_id(1)
    heads = range(d_state.shape[0])

    @pl.when(_is_last(owner, i))
    def _() -> None:
        for h in heads:
            d_state[h] = d_final[0, h].T

    for h in heads:
        d_next[0, h] = d_state[h].T

    for h in heads:
        d_out = chunk.value[0, h]
        d_written = product(chunk.inner[0, h], d_out, (0, 0)) + product(chunk.write[0, h], d_state[h], (1, 1))
        through = product(d_out, chunk.read[0, h], (0, 0)) - product(d_written, chunk.found[0, h], (0, 0))
        d_state[h] = chunk.keep[0, h] * d_state[h] + through

    @pl.when(_is_first(owner, i))
    def _() -> None:
        for h in heads:
            d_initial[0, h] = d_state[h].T


LANES, SUBLANES = 128, 8
"""Numbers side by side in a register, and rows of it. Sizes of keys and values are multiples of the first, tokens of a
chunk of the second."""

MAX_STATE, MAX_CHUNK = 256 * 256, 64
"""Numbers of a state, and tokens of a chunk, for which there is vector memory."""


def _accepts(chunks: Chunk, states: Any, *_: Any, **options: Any) -> bool:
    C, K, V = chunks.found.shape[-2], *states.shape[-2:]
    sizes = K % LANES == 0 and V % LANES == 0 and C % SUBLANES == 0 and K * V <= MAX_STATE and C <= MAX_CHUNK
    float32 = all(x.dtype == jnp.float32 for x in (*chunks, states))
    return sizes and float32 and chunks.value.size > 0 and states.size > 0


@delta_chunk_scan.implementation("pallas", platforms=("tpu",), single_device=True, accepts=_accepts, experimental=True)
def _delta_chunk_scan_pallas(
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    *,
    keep_states: bool = False,
) -> tuple[Float[Array, "n m R C V"], Float[Array, "N m R K V"], Float[Array, "n m R K V"] | None]:
    options = {"keep_states": keep_states}
    reference = partial(delta_chunk_scan.reference, **options)
    return differentiated_as(reference, partial(chunk_scan, **options), chunks, states, owner)


@delta_chunk_scan_backward.implementation(
    "pallas", platforms=("tpu",), single_device=True, accepts=_accepts, experimental=True
)
def _delta_chunk_scan_backward_pallas(
    chunks: Chunk, d_final: Float[Array, "N m R K V"], owner: Int[Array, "n"], d_out: Float[Array, "n m R C V"]
) -> tuple[Float[Array, "N m R K V"], Float[Array, "n m R K V"]]:
    reference = delta_chunk_scan_backward.reference
    return differentiated_as(reference, chunk_scan_backward, chunks, d_final, owner, d_out)
