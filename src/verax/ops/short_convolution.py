"""A causal depthwise convolution over a few tokens: what hybrid models put before a recurrence (arXiv:2312.00752)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.errors import InvalidParameterError
from verax.ops._dispatch import Example, check_shapes, float32, operation
from verax.ops.delta._inputs import StateSlots, packed_offsets


@operation
def short_convolution(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C 1 W"],
    *,
    initial_state: Float[Array, "N w C"] | None = None,
    cu_seqlens: Int[Array, "M"] | None = None,
    slots: StateSlots | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "N w C"]]:
    """`y[t] = sum_j weight[:, 0, j] x[t - (W - 1) + j]`, one filter a channel, in float32.

    Args:
        x: inputs; no output depends on a later one.
        weight: as PyTorch's `Conv1d(C, C, W, groups=C)` stores it.
        initial_state: the `w = W - 1` inputs before each sequence, oldest first; zeros if None. N is B, or
            `len(cu_seqlens) - 1`.
        cu_seqlens: `[N + 1]` ascending offsets from 0 of sequences packed along T of a batch of one. No sequence sees
            another. Tokens past the last offset belong to no sequence: their results mean nothing.
        slots: where the sequences' inputs lie in an initial state `[slots, w, C]` of all slots, and in the result.

    Returns:
        Outputs, and the last W - 1 inputs of each sequence, its initial state included: the next call's initial state.

    Raises:
        InvalidParameterError: for arguments whose shapes do not fit each other, or offsets as the delta rules refuse.
    """
    B, T, C = x.shape
    w = weight.shape[-1] - 1
    cu_seqlens = packed_offsets(cu_seqlens, B, T)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = N if slots is None or initial_state is None else initial_state.shape[0]
    check_shapes(weight=(weight, (C, 1, max(w, 0) + 1)), initial_state=(initial_state, (states, w, C)))
    if slots is not None:
        if initial_state is None:
            raise InvalidParameterError("slots: expected initial_state with them, the states of all slots")
        slots = slots.ready(N)
        before = slots.load(initial_state)
        out, after = short_convolution.reference(x, weight, initial_state=before, cu_seqlens=cu_seqlens)
        return out, slots.store(initial_state, after)
    x, taps = x.astype(jnp.float32), weight[:, 0].astype(jnp.float32)
    state = jnp.zeros((N, w, C), jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)
    if T == 0:
        return x, state
    if cu_seqlens is None:
        whole = jnp.concatenate([state, x], axis=1)
        lagged = [taps[:, w - lag] * whole[:, w - lag : w - lag + T] for lag in range(1, w + 1)]
        return sum(lagged, start=taps[:, w] * x), whole[:, T:]

    token = jnp.arange(T)
    owner = jnp.clip(jnp.searchsorted(cu_seqlens, token, side="right") - 1, 0, N - 1)
    place = token - cu_seqlens[owner]
    out = taps[:, w] * x[0]
    for lag in range(1, w + 1):
        before = state[owner, jnp.clip(w + place - lag, 0, w - 1)]
        out += taps[:, w - lag] * jnp.where((place >= lag)[:, None], jnp.roll(x[0], lag, axis=0), before)
    # The last w of each sequence's inputs: its own where it has them, else what is left of its state.
    length = jnp.diff(cu_seqlens)[:, None]
    from_end = jnp.arange(w) - w + length
    own = x[0, jnp.clip(cu_seqlens[:-1, None] + from_end, 0, T - 1)]
    kept = jnp.take_along_axis(state, jnp.clip(w + from_end, 0, w - 1)[..., None], axis=1)
    return out[None], jnp.where((from_end >= 0)[..., None], own, kept)


short_convolution.examples = [Example((float32(1, 64, 8192), float32(8192, 1, 4)))]
