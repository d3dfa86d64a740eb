"""The one recurrence that every rule of the family is a case of, and the checks that stand before it.

Letters: B batch, T tokens, H key heads, HV value heads, K key size, V value size, N sequences.

`StateSlots` are the places of an array where an engine keeps the recurrent states of its sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from verax.errors import InvalidParameterError
from verax.ops._dispatch import check_integers, check_shapes

L2_EPSILON = 1e-6
"""Under the root of a key's squared norm, as in flash-linear-attention and transformers."""


class DeltaInputs(NamedTuple):
    """One token's step on the state S (`[K, V]` for each value head), in this order.

        S <- Diag(exp(g)) S
        S <- S + write (beta (v - erase^T S))^T
        o  = read^T S

    A rule may let `erase` see S as it was before the decay. Value head h uses key head `h // (HV / H)`.
    """

    read: Float[Array, "B T H K"]
    erase: Float[Array, "B T H K"]
    write: Float[Array, "B T H K"]
    v: Float[Array, "B T HV V"]
    beta: Float[Array, "B T HV"]
    g: Float[Array, "B T HV"] | Float[Array, "B T HV K"]

    def ready(self, *, scale: float | Array = 1.0, use_qk_l2norm: bool = False, **_: object) -> DeltaInputs:
        """Inputs in one dtype, float32 or `read`'s if wider, with `read` scaled and keys normalised on request."""
        dtype = jnp.promote_types(self.read.dtype, jnp.float32)
        x = DeltaInputs(*(a.astype(dtype) for a in self))
        if use_qk_l2norm:
            x = x._replace(**{key: l2_normalize(getattr(x, key)) for key in ("read", "erase", "write")})
        return x._replace(read=x.read * scale)


class RecurrenceOptions(TypedDict, total=False):
    """Keyword arguments of `delta_recurrence` and of its implementations."""

    scale: float | Array
    use_qk_l2norm: bool
    erase_before_decay: bool
    chunk_size: int | None


def l2_normalize(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """`x / sqrt(sum(x^2) + 1e-6)` in float32 at least: zero rows stay zero, with a finite gradient."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPSILON)


def interleave(*steps: Float[Array, "B T *D"]) -> Float[Array, "B S *D"]:
    """`n` arrays of T steps each to one of `n T`: token t's steps lie next to each other."""
    B, T, *rest = steps[0].shape
    return jnp.stack(steps, axis=2).reshape(B, T * len(steps), *rest)


def packed_offsets(cu_seqlens: Any, batch: int, tokens: int) -> Int[Array, "M"] | None:
    """Offsets of packed sequences as int32; None for None. Those that the host knows, of NumPy or a list, are checked.

    Raises:
        InvalidParameterError: for anything but integers `[N + 1]`, another batch than one sequence of `tokens` tokens,
            or known offsets that do not ascend from 0 to at most `tokens`.
    """
    if cu_seqlens is None:
        return None
    known = None if isinstance(cu_seqlens, jax.Array) else np.asarray(cu_seqlens)
    offsets: Any = cu_seqlens if known is None else known
    if offsets.ndim != 1 or offsets.shape[0] < 2 or batch != 1:
        shape = list(offsets.shape)
        raise InvalidParameterError(
            f"cu_seqlens: expected offsets [N + 1] into a batch of 1, got {shape} and a batch of {batch}"
        )
    if not jnp.issubdtype(offsets.dtype, jnp.integer):
        raise InvalidParameterError(f"cu_seqlens: expected integers, got {offsets.dtype}")
    if known is not None and (known[0] != 0 or known[-1] > tokens or (known[1:] < known[:-1]).any()):
        raise InvalidParameterError(f"cu_seqlens: expected ascending offsets from 0 to at most {tokens}, got {known}")
    # Differences of unsigned integers are not negative, and few bits do not hold sums of lengths.
    return jnp.asarray(offsets, jnp.int32)


class StateSlots(NamedTuple):
    """Slots of N sequences, no two of which share one."""

    slot: Int[Array, "N"]
    """Slot of each sequence. A number past the last slot, or below 0, marks a row of padding: its state is dropped, and
    its outputs mean nothing, but are finite if its inputs are."""
    fresh: Bool[Array, "N"]
    """True for a sequence that starts from zeros, whatever the last owner left in its slot."""

    def ready(self, sequences: int) -> StateSlots:
        """Slots as arrays, int32 and bool, in which every row of padding has a number past the last slot.

        Raises:
            InvalidParameterError: for slots that are not integers, or not one for each of the sequences.
        """
        slot, fresh = jnp.asarray(self.slot), jnp.asarray(self.fresh, bool)
        check_shapes(**{"slots": (slot, (sequences,)), "slots.fresh": (fresh, (sequences,))})
        check_integers(slots=slot)
        slot = slot.astype(jnp.int32)
        return StateSlots(jnp.where(slot < 0, np.iinfo(np.int32).max, slot), fresh)

    def load(self, states: Float[Array, "S *D"]) -> Float[Array, "N *D"]:
        """States of the sequences, `[N, ...]`, out of the states of all slots, `[S, ...]`."""
        empty = self.fresh | (self.slot >= states.shape[0])
        taken = jnp.asarray(states).at[self.slot].get(mode="clip")
        return jnp.where(empty.reshape(-1, *[1] * (states.ndim - 1)), 0.0, taken)

    def store(self, states: Float[Array, "S *D"], new: Float[Array, "N *D"]) -> Float[Array, "S *D"]:
        """States of all slots, with new states in the slots of the sequences."""
        return jnp.asarray(states).at[self.slot].set(new, mode="drop")
