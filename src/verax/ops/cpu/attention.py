"""C++ kernels of attention: tiles of queries over blocks of keys, with memory linear in the sequence. Pages are read
and written where they lie.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import replaced_by
from verax.ops.attention import ScoreOptions, are_numbers, attention, check_scores
from verax.ops.cpu import library
from verax.ops.paged import PagedBatch, Pages, QuantizedPages, paged_attention, paged_decode_attention, write_pages

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


def _accepts(q: Any, k: Any, v: Any, *, causal: bool = True, window: int | None = None, **options: Any) -> bool:
    # With fewer keys than causal queries, the first queries see nothing: no model has such calls.
    visible = k.shape[1] >= q.shape[1] if causal else window is None
    return takes(q, k, v, k.shape[2]) and visible and are_numbers(window=window, **options)


def score_attributes(
    q: Any, *, scale: float | None = None, window: int | None = None, soft_cap: float | None = None, sinks: Any = None
) -> dict[str, np.generic]:
    """Scale, window and cap of scores as attributes of the kernels: 0 stands for no window and no cap.

    `sinks` are an array, which `library.optional` gives.
    """
    check_scores(window, soft_cap)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return {"scale": np.float32(factor), "window": np.int64(window or 0), "soft_cap": np.float32(soft_cap or 0)}


@attention.implementation("native", **library.REQUIREMENTS, accepts=_accepts, traits={"flash"})
def _attention_native(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    segments: Int[Array, "B T"] | None = None,
    **options: Unpack[ScoreOptions],
) -> Float[Array, "B T N H"]:
    def kernel(q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None) -> Array:
        listed = jnp.zeros((0, 0), jnp.int32) if segments is None else segments.astype(jnp.int32)
        # The kernel reads a tile's queries before it writes the tile's results, which may therefore take their place.
        in_place = int(q.dtype == jnp.float32 and q.size >= IN_PLACE)
        attributes = {"causal": causal, **score_attributes(q, **options)}
        result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
        arrays = q, k, v, listed, library.optional(sinks)
        return library.call_many("verax_attention", [result], *arrays, changed=in_place, **attributes)[0]

    def reference(q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None) -> Array:
        given: ScoreOptions = {**options, "sinks": sinks}
        return attention.reference(q, k, v, causal=causal, segments=segments, **given)

    # Where a derivative is taken, the reference computes the value too: its softmax is what the derivative needs.
    return replaced_by(reference, kernel, q, k, v, segments, options.get("sinks"))


def _accepts_pages(q: Any, k_cache: Any, v_cache: Any, *_: Any, **options: Any) -> bool:
    caches, K = (k_cache, v_cache), k_cache.shape[1]
    if not are_numbers(**options):
        return False
    if isinstance(k_cache, QuantizedPages):  # its values are in the place of an array that the kernels read
        int8 = all(isinstance(cache, QuantizedPages) and cache.dtype == jnp.int8 for cache in caches)
        return int8 and takes(q, q, q, K)
    return takes(q, *caches, K)


@paged_attention.implementation("native", **library.REQUIREMENTS, accepts=_accepts_pages)
def _paged_attention_native(
    q: Float[Array, "T N H"], *paged: Any, **options: Unpack[ScoreOptions]
) -> Float[Array, "T N H"]:
    k_cache, v_cache, *integers = PagedBatch.of(*paged)
    sinks = library.optional(options.get("sinks"))
    handler, pages = "verax_paged_attention", jax.tree.leaves((k_cache, v_cache))
    if isinstance(k_cache, QuantizedPages):
        handler = "verax_paged_attention_quantized"
    return library.call(handler, q.shape, q, *pages, *integers, sinks, **score_attributes(q, **options))


@paged_decode_attention.implementation("native", **library.REQUIREMENTS, accepts=_accepts_pages)
def _paged_decode_attention_native(
    q: Float[Array, "B N H"], *paged: Any, **options: Unpack[ScoreOptions]
) -> Float[Array, "B N H"]:
    # One query a sequence; one of length 0 sees nothing, which the kernel answers with 0.
    starts = jnp.asarray(np.arange(q.shape[0] + 1, dtype=np.int32))  # a constant: it takes a step no time
    return _paged_attention_native(q, *paged, starts, **options)


def _accepts_caches(k_cache: Any, v_cache: Any, *arrays: Any) -> bool:
    caches = k_cache, v_cache
    known = all(
        cache.dtype == jnp.int8 if isinstance(cache, QuantizedPages) else cache.dtype in FLOATS for cache in caches
    )
    return known and type(k_cache) is type(v_cache) and all(x.dtype in FLOATS for x in arrays[:2])


@write_pages.implementation("native", **library.REQUIREMENTS, accepts=_accepts_caches)
def _write_pages_native(
    k_cache: Pages,
    v_cache: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Int[Array, "T"],
    offsets: Int[Array, "T"],
) -> tuple[Pages, Pages]:
    arrays = k.astype(jnp.float32), v.astype(jnp.float32), pages.astype(jnp.int32), offsets.astype(jnp.int32)
    caches, tree = jax.tree.flatten((k_cache, v_cache))
    handler = "verax_write_pages_quantized" if isinstance(k_cache, QuantizedPages) else "verax_write_pages"
    return jax.tree.unflatten(tree, library.call_many(handler, caches, *caches, *arrays, changed=len(caches)))
