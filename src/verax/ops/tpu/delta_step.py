"""Decode step of the delta rules for TPUs in Pallas.

    for each sequence:
        for each value head:
            S <- the state in the sequence's slot
            for each of the few tokens:
                S <- decay S;  Z = beta (v - erase^T S);  S <- S + write Z^T;  out = read^T S
            the state in the slot <- S

So a sequence's states are copied into vector memory once and back once, while its neighbours are computed. A key is a
column next to the state's rows: the keys of all heads are transposed together. The vector unit sums over rows, in
float32.

A row of padding has the block of a neighbour, which is not copied again for it, and which it leaves alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from verax.ops.delta import delta_slot_recurrence
from verax.ops.delta._chunk import is_step
from verax.ops.delta._inputs import DeltaInputs, StateSlots, l2_normalize
from verax.ops.delta._recurrence import step_by_kernel
from verax.ops.tpu import pl, pltpu

__all__ = ["delta_step"]


def delta_step(
    x: DeltaInputs,
    states: Float[Array, "S HV K V"],
    slots: StateSlots,
    *,
    scale: float,
    use_qk_l2norm: bool,
    erase_before_decay: bool,
    interpret: Any = False,
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
        partial(_kernel, scale=scale, use_qk_l2norm=use_qk_l2norm, erase_before_decay=erase_before_decay),
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


def _kernel(
    block: Any, has_slot: Any, fresh: Any, *refs: Any, scale: float, use_qk_l2norm: bool, erase_before_decay: bool
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


LANES = 128
"""Numbers side by side in a register. Sizes of keys and values are multiples of it."""

MAX_STEP_STATES = 48 * 128 * 128
"""Numbers of a sequence's states in a decode step, for which there is: it holds four times as many, or 12 MiB."""


def _accepts_step(
    x: DeltaInputs, states: Any, slots: StateSlots, cu_seqlens: Any = None, *, scale: Any = 1.0, **_: Any
) -> bool:
    _, HV, K, V = states.shape
    dtypes = all(a.dtype in (jnp.float32, jnp.bfloat16) for a in x) and states.dtype == jnp.float32
    sizes = K % LANES == 0 and V % LANES == 0 and HV * K * V <= MAX_STEP_STATES and x.v.size > 0 and states.size > 0
    return dtypes and sizes and is_step(x, states, cu_seqlens) and not isinstance(scale, jax.Array)


@delta_slot_recurrence.implementation(
    "pallas", platforms=("tpu",), single_device=True, accepts=_accepts_step, experimental=True
)
def _delta_step_pallas(
    x: DeltaInputs, states: Float[Array, "S HV K V"], slots: StateSlots, cu_seqlens: None = None, **options: Any
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    return step_by_kernel(delta_step, x, states, slots, **options)
