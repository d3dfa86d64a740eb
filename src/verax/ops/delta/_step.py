"""The recurrence for one decode step: few tokens, unrolled, with one product of both keys with the state each."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from verax.ops.delta._inputs import DeltaInputs
from verax.ops.delta._recurrence import delta_recurrence

__all__ = ["is_step"]

STEP_TOKENS = 4
"""Most steps of a dense call that is unrolled: rules may take several steps a token."""


def is_step(x: DeltaInputs, initial_state: object, cu_seqlens: object = None, **_: object) -> bool:
    """True for a dense call of few tokens."""
    return cu_seqlens is None and 1 <= x.read.shape[1] <= STEP_TOKENS


@delta_recurrence.implementation("step", accepts=is_step)
def _delta_step(
    x: DeltaInputs,
    initial_state: Float[Array, "N HV K V"],
    cu_seqlens: Int[Array, "M"] | None = None,
    *,
    scale: float | Array = 1.0,
    use_qk_l2norm: bool = False,
    erase_before_decay: bool = False,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"]]:
    x = x.ready(scale, use_qk_l2norm)
    B, T, HV, V = x.v.shape
    H, K = x.read.shape[2:]
    state = initial_state.reshape(B, H, HV // H, K, V)
    outs = []
    for t in range(T):
        read, erase, write = (key[:, t, :, None] for key in x[:3])
        v, beta, g = (a[:, t].reshape(B, H, HV // H, -1) for a in x[3:])
        decay = jnp.exp(g)
        # Both keys read the old state at once; the output follows without reading the new one.
        keys = jnp.stack(jnp.broadcast_arrays(erase if erase_before_decay else erase * decay, read * decay), axis=-2)
        found = jnp.einsum("bhrmk,bhrkv->bhrmv", keys, state, precision=lax.Precision.HIGHEST)
        written = beta * (v - found[..., 0, :])
        outs.append(found[..., 1, :] + jnp.sum(read * write, axis=-1, keepdims=True) * written)
        state = decay[..., None] * state + write[..., None] * written[..., None, :]
    return jnp.stack(outs, axis=1).reshape(x.v.shape), state.reshape(initial_state.shape)
