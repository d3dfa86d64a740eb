"""The delta rule for NVIDIA GPUs in Pallas, lowered to Triton: the scan over chunks, its gradient, and the decode step.

    for each sequence, head and `columns` columns of the state, all at once:
        for each of the sequence's chunks:
            Z = value - erase S;  out = read S + inner Z;  S <- keep S + write^T Z

The gradient goes from the last chunk to the first, with a state's cotangent in the place of the state. So the state
stays in registers from a sequence's first chunk to its last. Columns of a state do not meet: they are spread over
programs, each of which reads the keys again.

    for each sequence, value head and `columns` columns of its state, all at once:
        S <- the state in the sequence's slot
        for each of the few tokens:
            S <- decay S;  Z = beta (v - erase^T S);  S <- S + write Z^T;  out = read^T S
        the state in the slot <- S

So a decode step reads a state once and writes it once, where it lies, and normalises keys where it reads them. It
multiplies nothing on tensor cores, so float32 stays float32. `gpu/attention.py` says why Triton compiles the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from verax.ops._target import AMPERE, has_compute_capability
from verax.ops.delta import delta_slot_recurrence
from verax.ops.delta._inputs import DeltaInputs, StateSlots, l2_normalize
from verax.ops.delta._recurrence import step_by, takes_step
from verax.ops.delta._scan import Chunk, register_scans, takes_scan
from verax.ops.gpu import KERNEL, pl, plgpu

EXACT = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
"""float32 products on tensor cores, of two TF32 numbers for each float32: errors of 1e-6. No CPU has them."""

ROWS = 32
"""Rows of a state that are multiplied at a time. More of them, more columns, or fewer warps spill registers."""

BACKWARD_ROWS = 128
"""Likewise for the gradient, where fewer spill registers."""

PARAMETERS = {"num_warps": 8, "num_stages": 1}


KEY_SIZES = (32, 64, 128, 256)
"""Sizes of keys: tiles of Triton are powers of two."""

COLUMNS = 16
"""The size of values is a multiple of it: the columns of the state in a program."""

CHUNK_SIZES = (16, 32, 64)

MAX_KEYS = 64 * 128
"""Numbers of a chunk's keys, for which there is shared memory."""


def walk(
    name: str,
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    sizes: Sequence[tuple[int, ...]],
    *,
    columns: int = COLUMNS,
    interpret: bool = False,
) -> tuple[Float[Array, "N m R K V"], list[Float[Array, "n m R _ V"]]]:
    """Results of a kernel that walks over the chunks: one for each sequence, and those for each chunk.

    `name`: the kernel's name, here and in the compiled program. `states`: a sequence's input, as large as its result.
    `columns`: columns of a state in a program; they divide its columns.
    """
    (n, m, R, _, V), (N, *_, K, _) = chunks.value.shape, states.shape
    shapes = [(N, m * R, K, V), *((n, m * R, *size) for size in sizes)]
    varying = jax.typeof(states).mat
    run = pl.pallas_call(
        partial(_KERNELS[name], columns=columns, precision=lax.Precision.HIGHEST if interpret else EXACT),
        grid=(N, m * R, V // columns),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying) for shape in shapes],
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
    C, K = chunks.erase.shape[2:]
    b, h = pl.program_id(0), pl.program_id(1)
    c, v = jnp.arange(C)[None], (pl.program_id(2) * columns + jnp.arange(columns))[:, None]
    rows = _parts(K, ROWS)
    dot = partial(plgpu.dot, precision=precision)

    def body(i: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
        for ref in before:
            for k, part in zip(rows, state, strict=True):
                plgpu.store(ref.at[i, h, k, v], part)
        written = plgpu.load(chunks.value.at[i, h, c, v]) - _read(rows, state, chunks.erase, i, h, precision)
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
    C, K = chunks.erase.shape[2:]
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
            part = _keep(chunks.keep, i, h, k) * part - dot(d_written, plgpu.load(chunks.erase.at[i, h, c.T, k]))
            return part + dot(d_out, plgpu.load(chunks.read.at[i, h, c.T, k]))

        return tuple(update(k, part) for k, part in zip(rows, d_state, strict=True))

    d_state = tuple(plgpu.load(d_final.at[b, h, k, v]) for k in rows)
    d_state = lax.fori_loop(first, end, body, d_state)
    for k, part in zip(rows, d_state, strict=True):
        plgpu.store(d_initial.at[b, h, k, v], part)


_KERNELS = {"delta_chunk_scan": _kernel, "delta_chunk_scan_backward": _backward_kernel}


def _accepts(chunks: Chunk, states: Any, *_: Any, **options: Any) -> bool:
    C, K, V = chunks.erase.shape[-2], *states.shape[-2:]
    sizes = K in KEY_SIZES and V % COLUMNS == 0 and C in CHUNK_SIZES and C * K <= MAX_KEYS
    return sizes and takes_scan(chunks, states) and has_compute_capability(AMPERE)


register_scans("triton", walk, _accepts, **KERNEL)


MOST_COLUMNS, FEWEST_COLUMNS = 32, 8
"""Columns of a state in a program: a cache line of float32, and a sector of it, which is the least that is read."""

STEP_PROGRAMS = 528
"""Programs that keep an H100's 132 multiprocessors busy, four on each."""

STEP_PARAMETERS = {"num_warps": 4, "num_stages": 1}


def columns_of_program(heads: int, V: int) -> int:
    """Columns of a state in a program: the most that leave `STEP_PROGRAMS` to run, for `heads` states in all."""
    columns = MOST_COLUMNS
    while columns > FEWEST_COLUMNS and heads * pl.cdiv(V, columns) < STEP_PROGRAMS:
        columns //= 2
    return columns


def delta_step(
    x: DeltaInputs, states: Float[Array, "S HV K V"], slots: StateSlots, *, interpret: bool = False, **options: Any
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    """`ops.delta.delta_slot_recurrence` of few tokens, with `interpret` as `pallas_call` takes it."""
    B, _, HV, V = x.v.shape
    columns = columns_of_program(B * HV, V)
    run = pl.pallas_call(
        partial(_step_kernel, columns=columns, **options),
        grid=(B, HV, pl.cdiv(V, columns)),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.v.shape, states.shape)],
        input_output_aliases={2 + len(x): 1},
        compiler_params=plgpu.CompilerParams(**STEP_PARAMETERS),
        interpret=interpret,
        name="delta_step",
    )
    written = slots.slot.astype(jnp.int32)
    read = jnp.where(slots.fresh, states.shape[0], written)  # zeros lie past the last slot
    beta, g = (a.reshape(*x.beta.shape, -1) for a in (x.beta, x.g))
    out, states = run(read, written, *x._replace(beta=beta, g=g), states)
    return out, states


def _step_kernel(
    read: Any,
    written: Any,
    *refs: Any,
    columns: int,
    scale: float = 1.0,
    use_qk_l2norm: bool = False,
    erase_before_decay: bool = False,
) -> None:
    *inputs, before, out, after = refs
    x: Any = DeltaInputs(*inputs)
    (_, T, H, K), (HV, V), S = x.read.shape, x.v.shape[2:], before.shape[0]
    b, h = pl.program_id(0), pl.program_id(1)
    k, v = jnp.arange(pl.next_power_of_2(K)), pl.program_id(2) * columns + jnp.arange(columns)
    rows, columns_there = k < K, v < V
    cells = rows[:, None] & columns_there[None]
    only = jnp.arange(1)  # an index of numbers alone is not interpreted

    def load(ref: Any, *at: Any, mask: Any = None) -> Array:
        return plgpu.load(ref.at[at], mask=mask, other=None if mask is None else 0.0).astype(jnp.float32)

    def key(ref: Any, t: int) -> Array:
        row = load(ref, b, t, h // (HV // H), k, mask=rows)
        return l2_normalize(row) if use_qk_l2norm else row

    def state_of(slot: Any) -> tuple[Any, ...]:
        return jnp.minimum(slot, S - 1), h, k[:, None], v[None]

    state = load(before, *state_of(read[b]), mask=cells & (read[b] < S))
    for t in range(T):
        g = load(x.g, b, t, h, only) if x.g.shape[3] == 1 else load(x.g, b, t, h, k, mask=rows)
        decayed = jnp.exp(g)[:, None] * state
        stored = jnp.sum(key(x.erase, t)[:, None] * (state if erase_before_decay else decayed), axis=0)
        new = load(x.beta, b, t, h, only) * (load(x.v, b, t, h, v, mask=columns_there) - stored)
        state = decayed + key(x.write, t)[:, None] * new[None]
        out_key = scale * key(x.read, t)
        plgpu.store(out.at[b, t, h, v], jnp.sum(out_key[:, None] * state, axis=0), mask=columns_there)
    plgpu.store(after.at[state_of(written[b])], state, mask=cells & (written[b] < S))


FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)

MAX_STEP_KEYS = 256
"""Largest size of keys in a decode step, for which a program has registers."""


def _accepts_step(x: DeltaInputs, states: Any, slots: StateSlots, cu_seqlens: Any = None, **options: Any) -> bool:
    sizes = 0 < x.read.shape[3] <= MAX_STEP_KEYS and all(a.dtype in FLOATS for a in x)
    return sizes and takes_step(x, states, cu_seqlens, **options) and has_compute_capability(AMPERE)


delta_slot_recurrence.implementation("triton", **KERNEL, accepts=_accepts_step, experimental=True)(step_by(delta_step))
