"""The delta rule's scan over chunks for NVIDIA GPUs in Pallas, lowered to Triton.

    for each sequence, head and `columns` columns of the state, all at once:
        for each of the sequence's chunks:
            Z = value - found S;  out = read S + inner Z;  S <- keep S + write^T Z

So the state stays in registers from a sequence's first chunk to its last. Columns of a state do not meet: they are
spread over programs, each of which reads the keys again. `gpu/paged_kernel.py` says why Triton compiles it.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from verax.ops.delta._scan import Chunk

__all__ = ["chunk_scan"]

EXACT = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
"""float32 products on tensor cores, of two TF32 numbers for each float32: errors of 1e-6. No CPU has them."""

ROWS = 32
"""Rows of a state that are multiplied at a time. More of them, more columns, or fewer warps spill registers."""

PARAMETERS = {"num_warps": 8, "num_stages": 1}


def chunk_scan(
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    *,
    columns: int,
    keep_states: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "n m R C V"], Float[Array, "N m R K V"], Float[Array, "n m R K V"] | None]:
    """`ops.delta.delta_chunk_scan`.

    Args:
        chunks: see there.
        states: likewise.
        owner: likewise.
        columns: columns of a state in a program; they divide its columns.
        keep_states: see there.
        interpret: as `pallas_call` takes it.
    """
    (n, m, R, C, V), (N, *_, K, _) = chunks.value.shape, states.shape
    shapes = [(n, m * R, C, V), (N, m * R, K, V), (n, m * R, K, V)][: 3 if keep_states else 2]
    run = pl.pallas_call(
        partial(_kernel, columns=columns, precision=lax.Precision.HIGHEST if interpret else EXACT),
        grid=(N, m * R, V // columns),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(**PARAMETERS),
        interpret=interpret,
        name="delta_chunk_scan",
    )
    owner = jnp.minimum(owner, N - 1)  # unused chunks leave the last sequence's state as it is
    firsts = jnp.searchsorted(owner, jnp.arange(N + 1)).astype(jnp.int32)
    out, final, *before = run(firsts, states.reshape(shapes[1]), *(x.reshape(n, m * R, *x.shape[3:]) for x in chunks))
    return (
        out.reshape(n, m, R, C, V),
        final.reshape(states.shape),
        before[0].reshape(n, m, R, K, V) if keep_states else None,
    )


def _kernel(firsts: Any, initial: Any, *refs: Any, columns: int, precision: Any) -> None:
    chunks: Any = Chunk(*refs[:6])
    out, final, *before = refs[6:]
    C, K = chunks.found.shape[2:]
    b, h = pl.program_id(0), pl.program_id(1)
    c, v = jnp.arange(C)[None], (pl.program_id(2) * columns + jnp.arange(columns))[:, None]
    rows = [first + jnp.arange(min(K, ROWS))[None] for first in range(0, K, ROWS)]

    def dot(x: Array, y: Array) -> Array:
        return plgpu.dot(x, y, precision=precision)

    def body(i: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
        for ref in before:
            for k, part in zip(rows, state, strict=True):
                plgpu.store(ref.at[i, h, k, v], part)

        def read(keys: Any) -> Array:
            products = (dot(part, plgpu.load(keys.at[i, h, c, k.T])) for k, part in zip(rows, state, strict=True))
            return reduce(jnp.add, products)

        written = plgpu.load(chunks.value.at[i, h, c, v]) - read(chunks.found)
        inner = plgpu.load(chunks.inner.at[i, h, c, c.T])
        plgpu.store(out.at[i, h, c, v], read(chunks.read) + dot(written, inner))

        def update(k: Array, part: Array) -> Array:
            keep = plgpu.load(chunks.keep.at[i, h, k % chunks.keep.shape[2]])  # one for all keys, or one for each
            return keep * part + dot(written, plgpu.load(chunks.write.at[i, h, c.T, k]))

        return tuple(update(k, part) for k, part in zip(rows, state, strict=True))

    state = tuple(plgpu.load(initial.at[b, h, k, v]) for k in rows)
    state = lax.fori_loop(firsts[b], firsts[b + 1], body, state)
    for k, part in zip(rows, state, strict=True):
        plgpu.store(final.at[b, h, k, v], part)
