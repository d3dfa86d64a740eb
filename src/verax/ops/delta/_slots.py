"""The recurrence over states that lie in an engine's slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from verax.ops._derivative import differentiated_as
from verax.ops._dispatch import operation
from verax.ops._example import Example, boolean, float32, int32
from verax.ops.delta._inputs import DeltaInputs
from verax.ops.delta._recurrence import delta_recurrence
from verax.ops.state_slots import StateSlots

__all__ = ["delta_slot_recurrence", "step_by_kernel"]


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
    """Outputs of `delta_recurrence`, and the states of all slots, of which those of the sequences are new.

    Args:
        x: as in `delta_recurrence`, as are the options.
        states: states of all slots. Where a program may overwrite them, only those of the sequences are written.
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
def _examples() -> list[Example]:
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
