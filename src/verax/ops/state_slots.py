"""Slots: the places of an array where an engine keeps the recurrent states of its sequences."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["StateSlots"]


class StateSlots(NamedTuple):
    """Slots of N sequences, no two of which share one."""

    slot: Int[Array, "N"]
    """Slot of each sequence. A number past the last slot marks a row of padding: its state is dropped, and its outputs
    mean nothing, but are finite if its inputs are."""
    fresh: Bool[Array, "N"]
    """True for a sequence that starts from zeros, whatever the last owner left in its slot."""

    def load(self, states: Float[Array, "S *D"]) -> Float[Array, "N *D"]:
        """States of the sequences, from those of all slots."""
        empty = self.fresh | (self.slot >= states.shape[0])
        return jnp.where(empty.reshape(-1, *[1] * (states.ndim - 1)), 0.0, states.at[self.slot].get(mode="clip"))

    def store(self, states: Float[Array, "S *D"], new: Float[Array, "N *D"]) -> Float[Array, "S *D"]:
        """States of all slots, with new ones in those of the sequences."""
        return states.at[self.slot].set(new, mode="drop")
