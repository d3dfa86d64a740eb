"""Attention over pages by kernels for NVIDIA GPUs, `paged_kernel.py`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops._target import ADA, AMPERE, has_compute_capability
from verax.ops.paged import Pages, paged_attention, paged_decode_attention

__all__: list[str] = []

HEAD_SIZES = (64, 128, 256)
"""Head sizes: tiles of Triton are powers of two."""

DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)

MOST_QUERIES = 64
"""Queries of a key/value head: a tile of a ragged batch holds those of one token at least."""


def _accepts(q: Any, k_cache: Any, v_cache: Any, *_: Any, **options: Any) -> bool:
    alike = type(k_cache) is type(v_cache) and k_cache.dtype == v_cache.dtype and k_cache.shape == v_cache.shape
    _, K, _, H = k_cache.shape
    sizes = H in HEAD_SIZES and q.shape[1] // K <= MOST_QUERIES and q.size > 0
    known = has_compute_capability(*ADA) if k_cache.dtype == jnp.float8_e4m3fn else has_compute_capability(AMPERE)
    return alike and k_cache.dtype in DTYPES and sizes and known


@paged_decode_attention.implementation(
    "triton", platforms=("gpu",), single_device=True, accepts=_accepts, experimental=True
)
def _paged_decode_attention_triton(
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
    from verax.ops.gpu.paged_kernel import decode_attention  # Pallas takes half a second to import

    return decode_attention(q, k_cache, v_cache, page_table, kv_lengths, scale=scale, window=window, soft_cap=soft_cap)


@paged_attention.implementation("triton", platforms=("gpu",), single_device=True, accepts=_accepts, experimental=True)
def _paged_attention_triton(
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
    from verax.ops.gpu.paged_kernel import ragged_attention

    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    return ragged_attention(q, k_cache, v_cache, page_table, kv_lengths, query_starts, **options)
