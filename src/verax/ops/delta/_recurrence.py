"""The recurrence token by token, which is the oracle of its implementations, and over states that lie in an engine's
slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import Example, boolean, differentiated_as, float32, int32, operation
from verax.ops.delta._inputs import DeltaInputs, RecurrenceOptions, StateSlots


@operation(slow_on={"gpu": "it launches several kernels a token", "tpu": "it runs token by token"})
def delta_recurrence(
    x: DeltaInputs,
    initial_state: Float[Array, "N HV K V"],
    cu_seqlens: Int[Array, "M"] | None = None,
    *,
    scale: float | Array = 1.0,
    use_qk_l2norm: bool = False,
    erase_before_decay: bool = False,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"]]:
    """Run `DeltaInputs`' recurrence over whole sequences; outputs and final states in float32 (float64 if `read` is).

    Args:
        x: of any floating dtypes.
        initial_state: one state for each sequence, in the dtype of the result: N is B, or the number of packed
            sequences.
        cu_seqlens: `[N + 1]` offsets of packed sequences (B == 1); tokens past the last offset come out zero.
        use_qk_l2norm: normalise `read`, `erase` and `write` first, see `l2_normalize`.
        erase_before_decay: the erase key reads the state as it was before this token's decay.
        chunk_size: tokens handled at a time by the implementations that chunk; the result does not depend on it.
    """
    x = x.ready(scale=scale, use_qk_l2norm=use_qk_l2norm)
    T = x.v.shape[1]
    N = initial_state.shape[0]
    if cu_seqlens is None:
        sequence = jnp.zeros((T,), jnp.int32)
        states = initial_state[None]
    else:
        sequence = jnp.searchsorted(cu_seqlens, jnp.arange(T), side="right") - 1
        states = initial_state[:, None]

    # The walk carries every sequence's state: a packed one finds its own initial state and leaves its final one.
    def token(states: Array, step: tuple[DeltaInputs, Array]) -> tuple[Array, Array]:
        x, n = step
        before = lax.dynamic_index_in_dim(states, n, keepdims=False)
        state, out = _update(x, before, erase_before_decay)
        # A token of no sequence has a number past the last and would land on it.
        state = jnp.where(n < states.shape[0], state, before)
        return lax.dynamic_update_index_in_dim(states, state, n, axis=0), out

    states, out = lax.scan(token, states, (DeltaInputs(*(jnp.moveaxis(a, 1, 0) for a in x)), sequence))
    out = jnp.moveaxis(out, 0, 1)
    if cu_seqlens is None:
        return out, states[0]
    return jnp.where((sequence < N)[None, :, None, None], out, 0.0), states[:, 0]


def _example_inputs(batch: int, tokens: int) -> DeltaInputs:
    key, gate = float32(batch, tokens, 16, 128), float32(batch, tokens, 32)
    return DeltaInputs(key, key, key, v=float32(batch, tokens, 32, 128), beta=gate, g=gate)


delta_recurrence.examples = [
    Example((_example_inputs(1, tokens), float32(1, 32, 128, 128)), label=label)
    for tokens, label in ((1, "1 token"), (64, "64 tokens"))
]


def _update(x: DeltaInputs, state: Array, erase_before_decay: bool) -> tuple[Array, Array]:
    """One token, fields without their T axis: the definition, line by line."""
    B, HV, K, V = state.shape
    H = x.read.shape[1]
    state = state.reshape(B, H, HV // H, K, V)
    v, beta, g = (a.reshape(B, H, HV // H, *a.shape[2:]) for a in (x.v, x.beta, x.g))
    decayed = state * jnp.exp(g.reshape(*beta.shape, -1, 1))
    stored = _read(x.erase, state if erase_before_decay else decayed)
    state = decayed + x.write[:, :, None, :, None] * (beta[..., None] * (v - stored))[..., None, :]
    return state.reshape(B, HV, K, V), _read(x.read, state).reshape(B, HV, V)


def _read(key: Float[Array, "B H K"], state: Float[Array, "B H R K V"]) -> Float[Array, "B H R V"]:
    return jnp.einsum("bhk,bhrkv->bhrv", key, state, precision=lax.Precision.HIGHEST)


@operation
def delta_slot_recurrence(
    x: DeltaInputs,
    states: Float[Array, "S HV K V"],
    slots: StateSlots,
    cu_seqlens: Int[Array, "M"] | None = None,
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    """Outputs of `delta_recurrence`, and the states of all slots, with new states in the slots of the sequences.

    `x`: as in `delta_recurrence`, as are the options. `states`: states of all slots. Where a program may overwrite
    them, only the states of the sequences are written.
    """
    out, new = delta_recurrence(x, slots.load(states), cu_seqlens, **options)
    return out, slots.store(states, new)


delta_slot_recurrence.examples = [
    Example((_example_inputs(4, 1), float32(8, 32, 128, 128), StateSlots(int32(4), boolean(4))), label="1 token")
]


STEP_TOKENS = 4
"""Most steps of a dense call that is one decode step: rules may take several steps a token."""


def is_step(x: DeltaInputs, states: Any, cu_seqlens: Any = None, *, scale: Any = 1.0, **_: Any) -> bool:
    """True for a dense call of few tokens."""
    return cu_seqlens is None and 1 <= x.read.shape[1] <= STEP_TOKENS


def takes_step(x: DeltaInputs, states: Any, cu_seqlens: Any, scale: Any = 1.0, **_: Any) -> bool:
    """True for a decode step that kernels take: numbers in it, states of float32, a scale that is known."""
    known = states.dtype == jnp.float32 and not isinstance(scale, jax.Array)
    return known and x.v.size > 0 and states.size > 0 and is_step(x, states, cu_seqlens)


def step_by(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Implementation of `delta_slot_recurrence` for one decode step by a kernel without a derivative.

    `kernel`: function of `x`, `states` and `slots`, and of all options but `chunk_size`: a step has no chunks.
    """

    def delta_step(
        x: DeltaInputs,
        states: Array,
        slots: StateSlots,
        cu_seqlens: None = None,
        *,
        chunk_size: int | None = None,
        **options: Any,
    ) -> tuple[Array, Array]:
        reference = partial(delta_slot_recurrence.reference, **options)
        return differentiated_as(reference, partial(kernel, **options), x, states, slots)

    return delta_step
