"""Decode step of the delta rules for NVIDIA GPUs in Pallas, lowered to Triton.

    for each sequence, value head and `columns` columns of its state, all at once:
        S <- the state in the sequence's slot
        for each of the few tokens:
            S <- decay S;  Z = beta (v - erase^T S);  S <- S + write Z^T;  out = read^T S
        the state in the slot <- S

So a state is read once and written once, where it lies, and the keys are normalised where they are read. Columns of a
state do not meet: programs share nothing but keys. Nothing is multiplied on tensor cores, so float32 stays float32.
`gpu/paged.py` says why Triton compiles it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from verax.ops._target import AMPERE, has_compute_capability
from verax.ops.delta import delta_slot_recurrence
from verax.ops.delta._chunk import is_step
from verax.ops.delta._inputs import DeltaInputs, StateSlots, l2_normalize
from verax.ops.delta._recurrence import step_by_kernel
from verax.ops.gpu import pl, plgpu

__all__ = ["columns_of_program", "delta_step"]

MOST_COLUMNS, FEWEST_COLUMNS = 32, 8
"""Columns of a state in a program: a cache line of float32, and a sector of it, which is the least that is read."""

PROGRAMS = 528
"""Programs that keep an H100's 132 multiprocessors busy, four on each."""

PARAMETERS = {"num_warps": 4, "num_stages": 1}


def columns_of_program(heads: int, V: int) -> int:
    """Columns of a state in a program: the most that leave `PROGRAMS` to run, for `heads` states in all."""
    columns = MOST_COLUMNS
    while columns > FEWEST_COLUMNS and heads * pl.cdiv(V, columns) < PROGRAMS:
        columns //= 2
    return columns


def delta_step(
    x: DeltaInputs,
    states: Float[Array, "S HV K V"],
    slots: StateSlots,
    *,
    scale: float,
    use_qk_l2norm: bool,
    erase_before_decay: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    """`ops.delta.delta_slot_recurrence` of few tokens, with `interpret` as `pallas_call` takes it."""
    B, _, HV, V = x.v.shape
    columns = columns_of_program(B * HV, V)
    run = pl.pallas_call(
        partial(
            _kernel,
            columns=columns,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            erase_before_decay=erase_before_decay,
        ),
        grid=(B, HV, pl.cdiv(V, columns)),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.v.shape, states.shape)],
        input_output_aliases={2 + len(x): 1},
        compiler_params=plgpu.CompilerParams(**PARAMETERS),
        interpret=interpret,
        name="delta_step",
    )
    written = slots.slot.astype(jnp.int32)
    read = jnp.where(slots.fresh, states.shape[0], written)  # zeros lie past the last slot
    beta, g = (a.reshape(*x.beta.shape, -1) for a in (x.beta, x.g))
    out, states = run(read, written, *x._replace(beta=beta, g=g), states)
    return out, states


def _kernel(
    read: Any, written: Any, *refs: Any, columns: int, scale: float, use_qk_l2norm: bool, erase_before_decay: bool
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

MAX_NUMBERS = 1 << 31
"""Numbers of all states in a decode step: Triton counts them in 32 bits."""


def _accepts_step(
    x: DeltaInputs, states: Any, slots: StateSlots, cu_seqlens: Any = None, *, scale: Any = 1.0, **_: Any
) -> bool:
    dtypes = all(a.dtype in FLOATS for a in x) and states.dtype == jnp.float32
    sizes = is_step(x, states, cu_seqlens) and 0 < x.read.shape[3] <= MAX_STEP_KEYS and 0 < states.size < MAX_NUMBERS
    constant = not isinstance(scale, jax.Array)
    return dtypes and sizes and x.v.size > 0 and constant and has_compute_capability(AMPERE)


@delta_slot_recurrence.implementation(
    "triton", platforms=("gpu",), single_device=True, accepts=_accepts_step, experimental=True
)
def _delta_step_triton(
    x: DeltaInputs, states: Float[Array, "S HV K V"], slots: StateSlots, cu_seqlens: None = None, **options: Any
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    return step_by_kernel(delta_step, x, states, slots, **options)
