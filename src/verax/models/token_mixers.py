"""Functions by which tokens see each other. A model takes them as arguments, so that it holds no cache and no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops

__all__ = ["AttentionFn", "RecurrentLayer", "RunRecurrent", "causal_attention", "run_from_zeros"]


@runtime_checkable
class AttentionFn(Protocol):
    """Attention of one layer. Training passes causal attention, the engine its paged cache."""

    def __call__(
        self,
        layer: int,
        q: Float[Array, "*B T N H"],
        k: Float[Array, "*B T K H"],
        v: Float[Array, "*B T K H"],
        /,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Float[Array, "*B T N H"]:
        """Attention of layer `layer`; the keywords are those of `ops.attention`."""
        ...


RecurrentLayer = Callable[
    [Float[Array, "B T D"], Any, Int[Array, "M"] | None, ops.StateSlots | None], tuple[Float[Array, "B T D"], Any]
]
"""A layer that goes through tokens in order: `recurrence(x, state, cu_seqlens, slots)` gives outputs and states after.

`state` is made by the configuration's `new_state`, one entry for each of N sequences; None stands for zeros. N is B;
or, packed, `len(cu_seqlens) - 1` sequences lie along T of a batch of one, as in `ops.delta`. With `slots` there is an
entry for each slot instead, in `state` and in the states after.
"""

RunRecurrent = Callable[[int, Float[Array, "*B T D"], RecurrentLayer], Float[Array, "*B T D"]]
"""Run of recurrent layer i: `run_recurrent(i, x, recurrence)` loads its sequences' states, and stores those after."""


def causal_attention(dtype: DTypeLike, segments: Int[Array, "B T"] | None = None) -> AttentionFn:
    """Causal attention over whole sequences `[B, T]`, for a model without a cache.

    Args:
        dtype: of keys and values.
        segments: as in `ops.attention`, for rows of several sequences.
    """

    def attend(
        layer: int, q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], **options: Any
    ) -> Float[Array, "B T N H"]:
        return ops.attention(q, k.astype(dtype), v.astype(dtype), segments=segments, **options)

    return attend


def run_from_zeros(cu_seqlens: Int[Array, "M"] | None = None) -> RunRecurrent:
    """Run of recurrent layers over whole sequences from zeroed states; the states after are dropped.

    Args:
        cu_seqlens: as in `ops.delta`, for sequences that are packed along one row.
    """

    def run(layer: int, x: Float[Array, "B T D"], recurrence: RecurrentLayer) -> Float[Array, "B T D"]:
        return recurrence(x, None, cu_seqlens, None)[0]

    return run
