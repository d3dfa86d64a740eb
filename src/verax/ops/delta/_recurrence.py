"""The recurrence token by token, which is the oracle of its implementations, and over states that lie in an engine's
slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import Example, boolean, differentiated_as, float32, int32, operation
from verax.ops.delta._inputs import DeltaInputs, StateSlots

__all__ = ["delta_recurrence", "delta_slot_recurrence", "step_by_kernel"]


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
        scale: factor on the outputs.
        use_qk_l2norm: normalise `read`, `erase` and `write` first, see `l2_normalize`.
        erase_before_decay: the erase key reads the state as it was before this token's decay.
        chunk_size: tokens handled at a time by the implementations that chunk; the result does not depend on it.
    """
    x = x.ready(scale, use_qk_l2norm)
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


@delta_recurrence.example
def _examples() -> list[Example]:
    def inputs(tokens: int) -> DeltaInputs:
        key, gate = float32(1, tokens, 16, 128), float32(1, tokens, 32)
        return DeltaInputs(key, key, key, v=float32(1, tokens, 32, 128), beta=gate, g=gate)

    state = float32(1, 32, 128, 128)
    return [Example((inputs(1), state), label="1 token"), Example((inputs(64), state), label="64 tokens")]


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
    *,
    scale: float | Array = 1.0,
    use_qk_l2norm: bool = False,
    erase_before_decay: bool = False,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    """Outputs of `delta_recurrence`, and the states of all slots, with new states in the slots of the sequences.

    Args:
        x: as in `delta_recurrence`, as are the options.
        states: states of all slots. Where a program may overwrite them, only the states of the sequences are written.
        slots: slots of the sequences.
        cu_seqlens: see there.
    """
    out, new = delta_recurrence(
        x,
        slots.load(states),
        cu_seqlens,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        erase_before_decay=erase_before_decay,
        chunk_size=chunk_size,
    )
    return out, slots.store(states, new)


@delta_slot_recurrence.example
def _slot_examples() -> list[Example]:
    key, gate = float32(4, 1, 16, 128), float32(4, 1, 32)
    x = DeltaInputs(key, key, key, v=float32(4, 1, 32, 128), beta=gate, g=gate)
    return [Example((x, float32(8, 32, 128, 128), StateSlots(int32(4), boolean(4))), label="1 token")]


def step_by_kernel(
    kernel: Callable[..., Any],
    x: DeltaInputs,
    states: Float[Array, "S HV K V"],
    slots: StateSlots,
    *,
    scale: float = 1.0,
    use_qk_l2norm: bool = False,
    erase_before_decay: bool = False,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    """Results of `delta_slot_recurrence` for one decode step by a kernel without a derivative.

    Args:
        kernel: function of `x`, `states` and `slots`, and of all options but `chunk_size`: a step has no chunks.
        x: see `delta_slot_recurrence`.
        states: see there.
        slots: see there.
    """
    options = {"scale": float(scale), "use_qk_l2norm": use_qk_l2norm, "erase_before_decay": erase_before_decay}
    reference = partial(delta_slot_recurrence.reference, **options)
    return differentiated_as(reference, partial(kernel, **options), x, states, slots)
