"""Attention over pages by a Pallas kernel for TPUs, `paged_kernel.py`."""

from __future__ import annotations

import math
from typing import Any

from jaxtyping import Array, Float, Int

from verax.ops.paged import Pages, paged_attention, paged_decode_attention

__all__: list[str] = []

LANES = 128
"""Numbers side by side in a register. A head is a multiple of them."""

SUBLANES = {"float32": 8, "bfloat16": 16, "int8": 16, "float8_e4m3fn": 16}
"""Tokens of a page are a multiple of them, by dtype of the pages, so that the tokens of several pages lie together."""

MAX_TABLE = 1 << 17
"""Entries of the page table, which lies in scalar memory."""

MAX_HEADS, MAX_GROUP = 32, 64
"""Key/value heads, and queries of one of them, for whose tiles there is vector memory."""


def _accepts(q: Any, k_cache: Any, v_cache: Any, page_table: Any, *_: Any, **options: Any) -> bool:
    _, K, p, H = k_cache.shape
    tiled = str(k_cache.dtype) in SUBLANES and H % LANES == 0 and p % SUBLANES[str(k_cache.dtype)] == 0
    tiled = tiled and (LANES % p == 0 or p % LANES == 0)  # scores of some pages are whole registers
    alike = type(k_cache) is type(v_cache) and k_cache.dtype == v_cache.dtype and k_cache.shape == v_cache.shape
    fits = K * H <= MAX_HEADS * LANES and q.shape[1] // K <= MAX_GROUP and math.prod(page_table.shape) <= MAX_TABLE
    return tiled and alike and fits and q.size > 0


@paged_decode_attention.implementation(
    "pallas", platforms=("tpu",), single_device=True, accepts=_accepts, experimental=True
)
def _paged_decode_attention_pallas(
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
    from verax.ops.tpu.paged_kernel import decode_attention  # Pallas takes half a second to import

    return decode_attention(q, k_cache, v_cache, page_table, kv_lengths, scale=scale, window=window, soft_cap=soft_cap)


@paged_attention.implementation("pallas", platforms=("tpu",), single_device=True, accepts=_accepts, experimental=True)
def _paged_attention_pallas(
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
    from verax.ops.tpu.paged_kernel import ragged_attention

    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    return ragged_attention(q, k_cache, v_cache, page_table, kv_lengths, query_starts, **options)
