"""Native implementations of paged attention: pages are read and written where they lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops.cpu import library
from verax.ops.cpu.attention import FLOATS, score_attributes, takes
from verax.ops.paged import paged_attention, paged_decode_attention, write_pages
from verax.ops.pages import Pages, QuantizedPages

__all__: list[str] = []


def _accepts(q: Any, k_cache: Any, v_cache: Any, *_: Any, **options: Any) -> bool:
    if isinstance(k_cache, QuantizedPages):  # its values in the place of an array that the kernels read
        int8 = k_cache.dtype == jnp.int8
        return (
            int8
            and isinstance(v_cache, QuantizedPages)
            and v_cache.dtype == jnp.int8
            and takes(q, q, q, k_cache.shape[1])
        )
    return takes(q, k_cache, v_cache, k_cache.shape[1])


@paged_attention.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _paged_attention_native(
    q: Float[Array, "T N H"],
    k_cache: Pages,
    v_cache: Pages,
    page_table: Int[Array, "B W"],
    kv_lengths: Int[Array, "B"],
    query_starts: Int[Array, "C"],
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T N H"]:
    integers = (x.astype(jnp.int32) for x in (page_table, kv_lengths, query_starts))
    attributes = score_attributes(q, scale, window, soft_cap)
    handler, pages = "verax_paged_attention", jax.tree.leaves((k_cache, v_cache))
    if isinstance(k_cache, QuantizedPages):
        handler = "verax_paged_attention_quantized"
    return library.call(handler, q.shape, q, *pages, *integers, **attributes)


@paged_decode_attention.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _paged_decode_attention_native(
    q: Float[Array, "B N H"],
    k_cache: Pages,
    v_cache: Pages,
    page_table: Int[Array, "B W"],
    kv_lengths: Int[Array, "B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B N H"]:
    # One query a sequence; one of length 0 sees nothing, which the kernel answers with 0.
    starts = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    return _paged_attention_native(q, k_cache, v_cache, page_table, kv_lengths, starts, **options)


def _accepts_cache(cache: Any, x: Any, *_: Any) -> bool:
    known = cache.dtype == jnp.int8 if isinstance(cache, QuantizedPages) else cache.dtype in FLOATS
    return known and x.dtype in FLOATS


@write_pages.implementation("native", **library.REQUIREMENTS, accepts=_accepts_cache)
def _write_pages_native(
    cache: Pages, x: Float[Array, "T K H"], pages: Int[Array, "T"], offsets: Int[Array, "T"]
) -> Pages:
    arrays = x.astype(jnp.float32), pages.astype(jnp.int32), offsets.astype(jnp.int32)
    if isinstance(cache, QuantizedPages):
        both = cache.values, cache.scales
        return QuantizedPages(*library.call_many("verax_write_pages_quantized", both, *both, *arrays, changed=2))
    return library.call_many("verax_write_pages", [cache], cache, *arrays, changed=1)[0]
