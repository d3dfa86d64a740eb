"""Sequence parallelism: the tokens of one sequence on several devices, each with a piece of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from verax.errors import InvalidParameterError

__all__ = ["sequence_parallel"]


def sequence_parallel(rule: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """`rule` (any rule of the family) for arrays whose T axis is split over the mesh axis `axis_name`.

    Call the result inside `jax.shard_map`, with the rule's arguments; `initial_state` and the final state are those of
    the whole sequences, the same on every device. Packed sequences are not taken.

    A piece changes the state it meets by an affine map, `S -> M S + H`. Every device runs its piece once for M and H
    (`M` being where the piece takes the identity without values), gathers those of all, folds the ones before its own
    into its initial state, and runs its piece. What is sent does not grow with T.
    """

    def run(
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        v: Float[Array, "B S HV V"],
        *args: Any,
        initial_state: Float[Array, "B HV K V"] | None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"] | None]:
        if options.get("cu_seqlens") is not None:
            raise InvalidParameterError("cu_seqlens: packed sequences cannot be split over devices")
        if options.get("slots") is not None:
            raise InvalidParameterError("slots: expected none, a split sequence starts from a state of its own")
        (B, _, HV, V), K = v.shape, q.shape[-1]
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        identity = jnp.broadcast_to(jnp.eye(K, V + K, V, dtype=dtype), (B, HV, K, V + K))
        no_values = jnp.zeros((*v.shape[:3], K), v.dtype)
        _, ends = rule(
            q, k, jnp.concatenate([v, no_values], -1), *args, initial_state=identity, output_final_state=True, **options
        )
        state = jnp.zeros((B, HV, K, V), dtype) if initial_state is None else initial_state.astype(dtype)

        def fold(state: Array, end: Array) -> tuple[Array, Array]:
            after = jnp.matmul(end[..., V:], state, precision=lax.Precision.HIGHEST) + end[..., :V]
            return after, state

        final, starts = lax.scan(fold, state, lax.all_gather(ends, axis_name))
        mine = lax.dynamic_index_in_dim(starts, lax.axis_index(axis_name), keepdims=False)
        out, _ = rule(q, k, v, *args, initial_state=mine, **options)
        return out, final if output_final_state else None

    return run
