"""The delta rule for TPUs in Pallas: the scan over chunks, its gradient, and the decode step.

    for each few heads:
        for each chunk:
            S <- the initial state, if the chunk is a sequence's first
            Z = value - erase S;  out = read S + inner Z;  S <- keep S + write^T Z
            the final state <- S, if it is the sequence's last

The gradient goes from the last chunk to the first, with a state's cotangent in the place of the state. So the state
stays in vector memory from a sequence's first chunk to its last, and a chunk's inputs are copied while the chunk before
it is multiplied. Products of one head wait for each other, but not for another head's. The state lies transposed, so
that a decay by channel is a row of it.

    for each sequence:
        for each value head:
            S <- the state in the sequence's slot
            for each of the few tokens:
                S <- decay S;  Z = beta (v - erase^T S);  S <- S + write Z^T;  out = read^T S
            the state in the slot <- S

So a decode step copies a sequence's states into vector memory once and back once, while its neighbours are computed. A
key is a column next to the state's rows: the keys of all heads are transposed together. The vector unit sums over rows,
in float32. A row of padding has the block of a neighbour, which is not copied again for it, and which it leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from verax.ops.delta import delta_slot_recurrence
from verax.ops.delta._inputs import DeltaInputs, StateSlots, l2_normalize
from verax.ops.delta._recurrence import step_by, takes_step
from verax.ops.delta._scan import Chunk, register_scans, takes_scan
from verax.ops.tpu import KERNEL, pl, pltpu, product

MAX_HEADS = 8
"""Heads that are multiplied together."""

MEMORY = 12 << 20
"""Bytes of the 16 MiB of vector memory that XLA gives to a kernel, for arrays that are copied, two buffers each."""


def heads_of_step(heads: int, C: int, K: int, V: int) -> int:
    """Heads that are multiplied together: as many as there is vector memory for, with the states before chunks."""
    numbers = C * (2 * V + 3 * K + max(C, 128)) + 3 * K * V
    return max(1, min(heads, MAX_HEADS, MEMORY // (2 * 4 * numbers + 4 * K * V)))


def walk(
    name: str,
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    sizes: Sequence[tuple[int, ...]],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "N m R K V"], list[Float[Array, "n m R _ V"]]]:
    """Results of a kernel that walks over the chunks: one for each sequence, and those for each chunk.

    `name`: the kernel's name, here and in the compiled program. `states`: a sequence's input, as large as its result.
    """
    kernel, backward = (_kernel, False) if name == "delta_chunk_scan" else (_backward_kernel, True)
    (n, m, R, C, V), (N, *_, K, _) = chunks.value.shape, states.shape
    heads = m * R
    together = heads_of_step(heads, C, K, V)

    def chunk_at(i: Any) -> Any:
        return n - 1 - i if backward else i

    def of_chunk(*size: int) -> Any:
        return pl.BlockSpec((1, together, *size), lambda h, i, owner: (chunk_at(i), h, 0, 0))

    of_sequence = pl.BlockSpec((1, together, K, V), lambda h, i, owner: (owner[chunk_at(i)], h, 0, 0))
    shapes = [(N, heads, K, V), *((n, heads, *size) for size in sizes)]
    inputs = [x.reshape(n, heads, *x.shape[3:]) for x in chunks._replace(keep=chunks.keep[..., None, :])]
    varying = jax.typeof(states).mat
    run = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(heads, together), n),
            in_specs=[of_sequence, *(of_chunk(*x.shape[2:]) for x in inputs)],
            out_specs=[of_sequence, *(of_chunk(*size) for size in sizes)],
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
        written = chunk.value[0, h] - product(chunk.erase[0, h], state[h], (1, 1))
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
        through = product(d_out, chunk.read[0, h], (0, 0)) - product(d_written, chunk.erase[0, h], (0, 0))
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
    C, K, V = chunks.erase.shape[-2], *states.shape[-2:]
    sizes = K % LANES == 0 and V % LANES == 0 and C % SUBLANES == 0 and K * V <= MAX_STATE and C <= MAX_CHUNK
    return sizes and takes_scan(chunks, states)


register_scans("pallas", walk, _accepts, **KERNEL)


def delta_step(
    x: DeltaInputs, states: Float[Array, "S HV K V"], slots: StateSlots, *, interpret: Any = False, **options: Any
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    """`ops.delta.delta_slot_recurrence` of few tokens, with `interpret` as `pallas_call` takes it."""
    S = states.shape[0]
    inputs = x._replace(beta=x.beta[..., None], g=x.g.reshape(*x.beta.shape, -1))

    def of_sequence(a: Array) -> Any:
        return pl.BlockSpec((1, *a.shape[1:]), lambda b, *_: (b, 0, 0, 0))

    in_slot = pl.BlockSpec((1, *states.shape[1:]), lambda b, block, *_: (block[b], 0, 0, 0))
    has_slot = slots.slot < S
    scalars = _blocks(slots.slot, has_slot, S), has_slot, slots.fresh
    run = pl.pallas_call(
        partial(_step_kernel, **options),
        # XLA would move the states of all slots into vector memory before the kernel, and back after it.
        out_shape=[jax.ShapeDtypeStruct(x.v.shape, jnp.float32), pltpu.MemorySpace.HBM(states.shape, jnp.float32)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(x.v.shape[0],),
            in_specs=[*map(of_sequence, inputs), in_slot],
            out_specs=[of_sequence(x.v), in_slot],
        ),
        input_output_aliases={len(scalars) + len(inputs): 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="delta_step",
    )
    out, states = run(*(a.astype(jnp.int32) for a in scalars), *inputs, states)
    # Without it, XLA refuses a program whose donated states are its result as well: it places the two apart.
    return out, lax.optimization_barrier(states)


def _blocks(slot: Int[Array, "B"], has_slot: Bool[Array, "B"], S: int) -> Int[Array, "B"]:
    """Slot of each row; padding has the slot of the last sequence before it, or else of the first one after it."""
    last = lax.cummax(jnp.where(has_slot, jnp.arange(slot.shape[0]), -1))
    return jnp.minimum(slot[jnp.where(last < 0, jnp.argmax(has_slot), last)], S - 1)


def _step_kernel(
    block: Any,
    has_slot: Any,
    fresh: Any,
    *refs: Any,
    scale: float = 1.0,
    use_qk_l2norm: bool = False,
    erase_before_decay: bool = False,
) -> None:
    *inputs, before, out, after = refs
    x: Any = DeltaInputs(*inputs)
    (_, T, H, _), (HV, V) = x.read.shape, x.v.shape[2:]
    b = pl.program_id(0)

    @pl.when(has_slot[b] == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when((b == 0) & (has_slot[0] == 0))
    def _() -> None:
        after[...] = before[...]  # it is copied back, and nothing else is written there if all rows are padding

    def keys(ref: Any, t: int) -> list[Array]:
        rows = ref[0, t].astype(jnp.float32)
        return _columns(l2_normalize(rows) if use_qk_l2norm else rows)

    def by_head(rows: Float[Array, "HV D"]) -> list[Array]:
        whole = jnp.broadcast_to(rows.astype(jnp.float32), (HV, V))
        return [whole[h : h + 1] for h in range(HV)]

    @pl.when(has_slot[b] == 1)
    def _() -> None:
        read, erase, write = ([keys(ref, t) for t in range(T)] for ref in (x.read, x.erase, x.write))
        values, beta = ([by_head(ref[0, t]) for t in range(T)] for ref in (x.v, x.beta))
        decays = [jnp.exp(x.g[0, t].astype(jnp.float32)) for t in range(T)]
        decay = [by_head(rows) if rows.shape[1] == 1 else _columns(rows) for rows in decays]
        for h in range(HV):
            key = h // (HV // H)
            state = jnp.where(fresh[b] == 1, 0.0, before[0, h])
            for t in range(T):
                decayed = decay[t][h] * state
                erased = state if erase_before_decay else decayed
                stored = jnp.sum(erase[t][key] * erased, axis=0, keepdims=True)
                state = decayed + write[t][key] * (beta[t][h] * (values[t][h] - stored))
                out[0, t, h] = scale * jnp.sum(read[t][key] * state, axis=0)
            after[0, h] = state


def _columns(rows: Float[Array, "h K"]) -> list[Array]:
    """Each row as a column."""
    whole = rows.T
    return [whole[:, h : h + 1] for h in range(whole.shape[1])]


MAX_STEP_STATES = 48 * 128 * 128
"""Numbers of a sequence's states in a decode step, for which there is: it holds four times as many, or 12 MiB."""


def _accepts_step(x: DeltaInputs, states: Any, slots: StateSlots, cu_seqlens: Any = None, **options: Any) -> bool:
    _, HV, K, V = states.shape
    sizes = K % LANES == 0 and V % LANES == 0 and HV * K * V <= MAX_STEP_STATES
    dtypes = all(a.dtype in (jnp.float32, jnp.bfloat16) for a in x)
    return sizes and dtypes and takes_step(x, states, cu_seqlens, **options)


delta_slot_recurrence.implementation("pallas", **KERNEL, accepts=_accepts_step)(step_by(delta_step))
