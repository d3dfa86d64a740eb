"""The delta rule's scan over chunks and its gradient for NVIDIA GPUs in Pallas, lowered to Triton.

    for each sequence, head and `columns` columns of the state, all at once:
        for each of the sequence's chunks:
            Z = value - found S;  out = read S + inner Z;  S <- keep S + write^T Z

The gradient goes from the last chunk to the first, with a state's cotangent in the place of the state.

So the state stays in registers from a sequence's first chunk to its last. Columns of a state do not meet: they are
spread over programs, each of which reads the keys again. `gpu/paged.py` says why Triton compiles it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import differentiated_as
from verax.ops._target import AMPERE, has_compute_capability
from verax.ops.delta._scan import Chunk, delta_chunk_scan, delta_chunk_scan_backward
from verax.ops.gpu import pl, plgpu

__all__ = ["chunk_scan", "chunk_scan_backward"]

EXACT = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
"""float32 products on tensor cores, of two TF32 numbers for each float32: errors of 1e-6. No CPU has them."""

ROWS = 32
"""Rows of a state that are multiplied at a time. More of them, more columns, or fewer warps spill registers."""

BACKWARD_ROWS = 128
"""Likewise for the gradient, where fewer spill registers."""

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
    by_chunk = [chunks.value.shape[-2:], states.shape[-2:]][: 2 if keep_states else 1]
    final, (out, *before) = _run(_kernel, "delta_chunk_scan", chunks, states, owner, by_chunk, columns, interpret)
    return out, final, before[0] if keep_states else None


def chunk_scan_backward(
    chunks: Chunk,
    d_final: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    d_out: Float[Array, "n m R C V"],
    *,
    columns: int,
    interpret: bool = False,
) -> tuple[Float[Array, "N m R K V"], Float[Array, "n m R K V"]]:
    """`ops.delta.delta_chunk_scan_backward`; with `columns` and `interpret` as in `chunk_scan`."""
    given, name = chunks._replace(value=d_out), "delta_chunk_scan_backward"
    by_chunk = [d_final.shape[-2:]]
    d_initial, (d_next,) = _run(_backward_kernel, name, given, d_final, owner, by_chunk, columns, interpret)
    return d_initial, d_next


def _run(
    kernel: Callable[..., None],
    name: str,
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    by_chunk: Sequence[tuple[int, ...]],
    columns: int,
    interpret: bool,
) -> tuple[Float[Array, "N m R K V"], list[Float[Array, "n m R _ V"]]]:
    """Results of a kernel that walks over the chunks: one for each sequence, and those for each chunk.

    Args:
        kernel: the kernel.
        name: its name in the compiled program.
        chunks: inputs of the chunks.
        states: a sequence's input, as large as its result.
        owner: sequence of each chunk.
        by_chunk: sizes of each result of a chunk, by head.
        columns: columns of a state in a program.
        interpret: as `pallas_call` takes it.
    """
    (n, m, R, _, V), (N, *_, K, _) = chunks.value.shape, states.shape
    shapes = [(N, m * R, K, V), *((n, m * R, *size) for size in by_chunk)]
    run = pl.pallas_call(
        partial(kernel, columns=columns, precision=lax.Precision.HIGHEST if interpret else EXACT),
        grid=(N, m * R, V // columns),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(**PARAMETERS),
        interpret=interpret,
        name=name,
    )
    inputs = (x.reshape(n, m * R, *x.shape[3:]) for x in chunks)
    after, *results = run(_firsts(owner, N), states.reshape(shapes[0]), *inputs)
    return after.reshape(states.shape), [a.reshape(n, m, R, *a.shape[2:]) for a in results]


def _firsts(owner: Int[Array, "n"], N: int) -> Int[Array, "M"]:
    """First chunk of each sequence, and the number of chunks; unused ones leave the last sequence's state as it is."""
    return jnp.searchsorted(jnp.minimum(owner, N - 1), jnp.arange(N + 1)).astype(jnp.int32)


def _parts(K: int, size: int) -> list[Array]:
    """Rows of each part of a state: `size` of them, or all."""
    return [first + jnp.arange(min(K, size))[None] for first in range(0, K, size)]


def _read(rows: list[Array], state: tuple[Array, ...], keys: Any, i: Any, h: Any, precision: Any) -> Array:
    """Transposed product of a chunk's keys with the state, of which each part is transposed too."""
    c = jnp.arange(keys.shape[2])[None]
    products = (
        plgpu.dot(part, plgpu.load(keys.at[i, h, c, k.T]), precision=precision)
        for k, part in zip(rows, state, strict=True)
    )
    return reduce(jnp.add, products)


def _keep(keep: Any, i: Any, h: Any, k: Array) -> Array:
    """Decay of these rows over a chunk: one for all, or one for each."""
    return plgpu.load(keep.at[i, h, k % keep.shape[2]])


def _kernel(firsts: Any, initial: Any, *refs: Any, columns: int, precision: Any) -> None:
    chunks: Any = Chunk(*refs[:6])
    final, out, *before = refs[6:]
    C, K = chunks.found.shape[2:]
    b, h = pl.program_id(0), pl.program_id(1)
    c, v = jnp.arange(C)[None], (pl.program_id(2) * columns + jnp.arange(columns))[:, None]
    rows = _parts(K, ROWS)
    dot = partial(plgpu.dot, precision=precision)

    def body(i: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
        for ref in before:
            for k, part in zip(rows, state, strict=True):
                plgpu.store(ref.at[i, h, k, v], part)
        written = plgpu.load(chunks.value.at[i, h, c, v]) - _read(rows, state, chunks.found, i, h, precision)
        inner = plgpu.load(chunks.inner.at[i, h, c, c.T])
        plgpu.store(out.at[i, h, c, v], _read(rows, state, chunks.read, i, h, precision) + dot(written, inner))
        return tuple(
            _keep(chunks.keep, i, h, k) * part + dot(written, plgpu.load(chunks.write.at[i, h, c.T, k]))
            for k, part in zip(rows, state, strict=True)
        )

    state = tuple(plgpu.load(initial.at[b, h, k, v]) for k in rows)
    state = lax.fori_loop(firsts[b], firsts[b + 1], body, state)
    for k, part in zip(rows, state, strict=True):
        plgpu.store(final.at[b, h, k, v], part)


def _backward_kernel(firsts: Any, d_final: Any, *refs: Any, columns: int, precision: Any) -> None:
    *inputs, d_initial, d_next = refs
    chunks: Any = Chunk(*inputs)  # with the cotangents of outputs in the place of values
    C, K = chunks.found.shape[2:]
    b, h = pl.program_id(0), pl.program_id(1)
    c, v = jnp.arange(C)[None], (pl.program_id(2) * columns + jnp.arange(columns))[:, None]
    rows = _parts(K, BACKWARD_ROWS)
    dot = partial(plgpu.dot, precision=precision)
    first, end = firsts[b], firsts[b + 1]

    def body(turn: Any, d_state: tuple[Array, ...]) -> tuple[Array, ...]:
        i = first + end - 1 - turn
        for k, part in zip(rows, d_state, strict=True):
            plgpu.store(d_next.at[i, h, k, v], part)
        d_out = plgpu.load(chunks.value.at[i, h, c, v])
        inner = plgpu.load(chunks.inner.at[i, h, c.T, c])
        d_written = dot(d_out, inner) + _read(rows, d_state, chunks.write, i, h, precision)

        def update(k: Array, part: Array) -> Array:
            part = _keep(chunks.keep, i, h, k) * part - dot(d_written, plgpu.load(chunks.found.at[i, h, c.T, k]))
            return part + dot(d_out, plgpu.load(chunks.read.at[i, h, c.T, k]))

        return tuple(update(k, part) for k, part in zip(rows, d_state, strict=True))

    d_state = tuple(plgpu.load(d_final.at[b, h, k, v]) for k in rows)
    d_state = lax.fori_loop(first, end, body, d_state)
    for k, part in zip(rows, d_state, strict=True):
        plgpu.store(d_initial.at[b, h, k, v], part)


KEY_SIZES = (32, 64, 128, 256)
"""Sizes of keys: tiles of Triton are powers of two."""

COLUMNS = 16
"""The size of values is a multiple of it: the columns of the state in a program."""

CHUNK_SIZES = (16, 32, 64)

MAX_KEYS = 64 * 128
"""Numbers of a chunk's keys, for which there is shared memory."""


def _accepts(chunks: Chunk, states: Any, *_: Any, **options: Any) -> bool:
    C, K, V = chunks.found.shape[-2], *states.shape[-2:]
    sizes = K in KEY_SIZES and V % COLUMNS == 0 and C in CHUNK_SIZES and C * K <= MAX_KEYS
    float32 = all(x.dtype == jnp.float32 for x in (*chunks, states))
    return sizes and float32 and chunks.value.size > 0 and states.size > 0 and has_compute_capability(AMPERE)


@delta_chunk_scan.implementation("triton", platforms=("gpu",), single_device=True, accepts=_accepts, experimental=True)
def _delta_chunk_scan_triton(
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    *,
    keep_states: bool = False,
) -> tuple[Float[Array, "n m R C V"], Float[Array, "N m R K V"], Float[Array, "n m R K V"] | None]:
    options = {"keep_states": keep_states}
    reference = partial(delta_chunk_scan.reference, **options)
    return differentiated_as(reference, partial(chunk_scan, columns=COLUMNS, **options), chunks, states, owner)


@delta_chunk_scan_backward.implementation(
    "triton", platforms=("gpu",), single_device=True, accepts=_accepts, experimental=True
)
def _delta_chunk_scan_backward_triton(
    chunks: Chunk, d_final: Float[Array, "N m R K V"], owner: Int[Array, "n"], d_out: Float[Array, "n m R C V"]
) -> tuple[Float[Array, "N m R K V"], Float[Array, "n m R K V"]]:
    kernel = partial(chunk_scan_backward, columns=COLUMNS)
    return differentiated_as(delta_chunk_scan_backward.reference, kernel, chunks, d_final, owner, d_out)
