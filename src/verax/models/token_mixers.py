"""How tokens meet each other is not a model's business: whoever calls one passes it in, as these functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

__all__ = ["AttentionFn", "RecurrentLayer", "RunRecurrent"]

AttentionFn = Callable[
    [int, Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K H"]], Float[Array, "*B T N H"]
]
"""How layer i attends: `attend(i, q, k, v)`. Training passes causal attention, the engine its paged cache."""

RecurrentLayer = Callable[[Float[Array, "B T D"], Any, Int[Array, "M"] | None], tuple[Float[Array, "B T D"], Any]]
"""A layer that goes through tokens in order: `recurrence(x, state, cu_seqlens)` gives outputs and the states after.

`state` is what the configuration's `new_state` makes, one entry for each of N sequences, or None for fresh ones. N is
B; or, packed, `len(cu_seqlens) - 1` sequences lie along T of a batch of one, as in `ops.delta`.
"""

RunRecurrent = Callable[[int, Float[Array, "*B T D"], RecurrentLayer], Float[Array, "*B T D"]]
"""How layer i gets at its sequences' states: `carry(i, x, recurrence)` runs it from them and keeps what it leaves."""
