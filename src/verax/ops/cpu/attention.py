"""C++ kernel of `ops.attention`: tiles of queries over blocks of keys, with memory linear in the sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from verax.ops.attention import attention
from verax.ops.cpu import library

__all__ = ["FLOATS", "score_attributes", "takes"]

FLOATS = (jnp.float32, jnp.bfloat16)
"""Dtypes that the kernels read."""

MAX_GROUP = 64
"""Query heads that may share a key/value head: they are rows of one tile (`ATTENTION_ROWS` in native/)."""

IN_PLACE = 1 << 22
"""Numbers of the queries from which the results take their memory. XLA copies queries that it cannot give away, or that
were reshaped: of fewer, a copy takes longer than new memory is worth."""


def takes(q: Any, k: Any, v: Any, num_kv_heads: int) -> bool:
    """True if the C++ kernels take arrays of these dtypes and head counts."""
    dtypes = q.dtype in FLOATS and k.dtype in FLOATS and v.dtype == k.dtype
    grouped = q.shape[-2] <= MAX_GROUP * num_kv_heads
    return dtypes and grouped


def _accepts(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    segments: Any = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> bool:
    # With fewer keys than causal queries, the first queries see nothing, for which the reference has its own answer.
    return takes(q, k, v, k.shape[2]) and (k.shape[1] >= q.shape[1] if causal else window is None)


def score_attributes(q: Any, scale: float | None, window: int | None, soft_cap: float | None) -> dict[str, np.generic]:
    """Scale, window and cap of scores as attributes of the kernels: 0 stands for no window and no cap."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return {"scale": np.float32(factor), "window": np.int64(window or 0), "soft_cap": np.float32(soft_cap or 0)}


@partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6, 7))
def _attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segments: Int[Array, "B T"] | None,
    causal: bool,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "B T N H"]:
    listed = jnp.zeros((0, 0), jnp.int32) if segments is None else segments.astype(jnp.int32)
    attributes = score_attributes(q, scale, window, soft_cap)
    # The kernel reads a tile's queries before it writes the tile's results, which may therefore take their place.
    in_place = int(q.dtype == jnp.float32 and q.size >= IN_PLACE)
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    arrays = q, k, v, listed
    return library.call_many("verax_attention", [result], *arrays, changed=in_place, causal=causal, **attributes)[0]


@_attention.defjvp
def _attention_jvp(
    causal: bool,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[Array, Array]:
    # Where a derivative is taken, the reference computes the value too: its softmax is what the derivative needs.
    *arrays, segments = primals

    def reference(q: Array, k: Array, v: Array) -> Array:
        options = {"scale": scale, "window": window, "soft_cap": soft_cap}
        return attention.reference(q, k, v, causal=causal, segments=segments, **options)

    return jax.jvp(reference, tuple(arrays), tangents[:3])


@attention.implementation("native", **library.REQUIREMENTS, accepts=_accepts, traits={"flash"})
def _attention_native(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    segments: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T N H"]:
    return _attention(q, k, v, segments, causal, scale, window, soft_cap)
