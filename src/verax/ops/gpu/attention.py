"""Attention on GPUs: by cuDNN, which writes no scores out (FlashAttention-2; Dao, 2023, arXiv:2307.08691), and over
pages by Pallas, lowered to Triton (FlashAttention-2, FlashDecoding).

JAX calls cuDNN only by name. No mask is passed, because cuDNN would read it as a bias for each score: calls with
windows, segments, soft caps or sinks are left to XLA. Over pages:

    decode:  for each sequence, key/value head and part of the context, all at once:
                 the head's G queries over the part's keys
             parts of a sequence are put together by their highest scores, in jnp
    ragged:  for each tile of a sequence's queries and each key/value head, all at once:
                 the head's queries of the tile over the keys that one of them sees

Either looks up a block of tokens in the page table, loads its keys and values, and updates an online softmax
(`_attend`). Keys that no query of the tile sees are not read, whatever their pages hold.

Pallas lowers to Triton or to Mosaic GPU, for which JAX deprecates Triton from 0.11 on. These kernels are Triton's: it
compiles with JAX 0.10 as well, multiplies 16 rows at a time, and its results can be checked without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from verax.ops._target import ADA, AMPERE, has_compute_capability, target
from verax.ops.attention import MASKED, are_numbers, attention, chunked_attention, exact_products, soft_capped
from verax.ops.gpu import KERNEL, pl, plgpu
from verax.ops.paged import (
    LARGEST,
    SMALLEST,
    PagedBatch,
    Pages,
    are_alike,
    is_quantized,
    paged_attention,
    paged_decode_attention,
    split_queries,
    write_pages,
)

MAX_HEAD_DIM = 128
"""Largest head size on every GPU that cuDNN's kernel runs on; Hopper and later take 256."""

HEAD_DIM_STEP = 8


def _accepts(q: Any, k: Any, v: Any, *, causal: bool = True, scale: Any = None, **masks: Any) -> bool:
    H = q.shape[-1]
    dtypes = k.dtype in (jnp.bfloat16, jnp.float16) and v.dtype == k.dtype
    sizes = H <= MAX_HEAD_DIM and H % HEAD_DIM_STEP == 0 and min(q.size, k.size) > 0
    # cuDNN counts causal keys from the first one, ops.attention from the last: the same for as many queries as keys.
    visible = all(mask is None for mask in masks.values()) and (not causal or q.shape[1] == k.shape[1])
    return dtypes and sizes and visible and not isinstance(scale, jax.Array) and has_compute_capability(AMPERE)


@attention.implementation("cudnn", platforms=("gpu",), accepts=_accepts, traits={"flash"})
def _attention_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    scale: float | None = None,
    **masks: None,
) -> Float[Array, "B T N H"]:
    if not target().attached:
        # JAX traces cuDNN's call only on a machine that has cuDNN. These products have the same shapes and results.
        return jax.jit(partial(chunked_attention, causal=causal, scale=scale))(q, k, v)
    out = jax.nn.dot_product_attention(q.astype(k.dtype), k, v, scale=scale, is_causal=causal, implementation="cudnn")
    return out.astype(jnp.float32)


BLOCK = 64
"""Keys of a block: 16 KiB in bfloat16 with heads of 128."""

MIN_ROWS = 16
"""Rows of a product on tensor cores. With fewer queries a head, the rest are zeros."""

TILE = 64
"""Rows of a tile of a ragged batch, queries times heads: the rows of a product of four warps on Hopper."""

PROGRAMS = 512
"""Programs that keep an H100's 132 multiprocessors busy, some four on each."""

MIN_PART = 256
"""Tokens of a part of a context. Shorter ones would not pay for putting the parts together."""

PARAMETERS = {"num_warps": 4, "num_stages": 3}


HEAD_SIZES = (64, 128, 256)
"""Head sizes: tiles of Triton are powers of two."""

DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)

MOST_QUERIES = 64
"""Queries of a key/value head: a tile of a ragged batch holds at least the queries of one token."""


MISCOUNTED = range((1 << 31) + 1, (1 << 32) + 1)
"""Sizes of arrays of bytes whose places Pallas counts in 32 bits with a sign. It takes 64 from 4 GiB on, which is early
enough for other dtypes."""


def _takes_pages(k_cache: Any, v_cache: Any) -> bool:
    """True for pages whose dtype, number and size of heads the kernels and the GPU have."""
    if is_quantized(k_cache.dtype) and math.prod(k_cache.shape) in MISCOUNTED:
        return False
    known = has_compute_capability(*ADA) if k_cache.dtype == jnp.float8_e4m3fn else has_compute_capability(AMPERE)
    return are_alike(k_cache, v_cache) and k_cache.dtype in DTYPES and k_cache.shape[3] in HEAD_SIZES and known


def _accepts_pages(q: Any, k_cache: Any, v_cache: Any, *_: Any, **options: Any) -> bool:
    sizes = q.shape[1] // k_cache.shape[1] <= MOST_QUERIES and q.size > 0
    plain = options.get("sinks") is None and are_numbers(**options)
    return sizes and plain and _takes_pages(k_cache, v_cache)


def num_parts(rows: int, heads: int, context: int) -> int:
    """Parts of a context, so that there are `PROGRAMS` in all."""
    return max(1, min(pl.cdiv(PROGRAMS, rows * heads), context // MIN_PART))


@paged_decode_attention.implementation("triton", **KERNEL, accepts=_accepts_pages)
def decode_attention(
    q: Float[Array, "B N H"],
    *paged: Any,
    scale: float | None = None,
    parts: int | None = None,
    interpret: bool = False,
    **options: Any,
) -> Float[Array, "B N H"]:
    """`ops.paged_decode_attention`; with a number of `parts`, and `interpret` as `pallas_call` takes it."""
    k_cache, v_cache, page_table, kv_lengths, _ = PagedBatch.of(*paged)
    (B, N, H), (_, K, p, _) = q.shape, k_cache.shape
    G = N // K
    parts = parts or num_parts(B, K, page_table.shape[1] * p)
    shapes = [(B, K, parts, G, H)] + ([(B, K, parts, G)] * 2 if parts > 1 else [])
    run = pl.pallas_call(
        partial(_decode_kernel, len(shapes), scale=H**-0.5 if scale is None else scale, **options),
        grid=(B, K, parts),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(**PARAMETERS),
        interpret=interpret,
        name="paged_decode_attention",
    )
    out, *rest = run(page_table, kv_lengths, q.reshape(B, K, G, H), *jax.tree.leaves((k_cache, v_cache)))
    if rest:
        highest, sums = rest
        shares = jnp.exp(highest - highest.max(2, keepdims=True))
        out = jnp.sum(shares[..., None] * out, 2) / _divisors(jnp.sum(shares * sums, 2))[..., None]
    return out.reshape(B, N, H)


def _divisors(sums: Array) -> Array:
    """Sums of weights; 1 for a query that sees nothing, whose result is 0. NaN stays."""
    return jnp.where(sums == 0, 1.0, sums)


def _decode_kernel(
    outs: int, table: Any, lengths: Any, q: Any, *refs: Any, scale: float, window: int | None = None, **options: Any
) -> None:
    caches, (out, *rest) = refs[:-outs], refs[-outs:]
    G, H = q.shape[2:]
    b, h, part = (pl.program_id(axis) for axis in range(3))
    length = lengths[b]
    first = 0 if window is None else jnp.maximum(length - window, 0)
    # Parts are whole blocks, so that all but the last block of a sequence are full.
    each = pl.cdiv(pl.cdiv(length - first, BLOCK), pl.num_programs(2)) * BLOCK
    begin = first + part * each
    rows, size = jnp.arange(max(MIN_ROWS, pl.next_power_of_2(G))), jnp.arange(H)[None]
    queries = _load_queries(q.at[b, h, rows[:, None], size], (rows < G)[:, None], scale, caches)
    last = jnp.broadcast_to(length - 1, rows.shape)
    keys = begin, jnp.minimum(begin + each, length)
    highest, sums, acc = _attend(queries, caches, table, b, h, keys, last, window, **options)
    for ref, values in zip(rest, (highest, sums), strict=False):
        plgpu.store(ref.at[b, h, part, rows], values, mask=rows < G)
    if not rest:
        acc /= _divisors(sums)[:, None]
    plgpu.store(out.at[b, h, part, rows[:, None], size], acc, mask=(rows < G)[:, None])


@paged_attention.implementation("triton", **KERNEL, accepts=_accepts_pages)
def ragged_attention(
    q: Float[Array, "T N H"], *paged: Any, scale: float | None = None, interpret: bool = False, **options: Any
) -> Float[Array, "T N H"]:
    """`ops.paged_attention`; with `interpret` as `pallas_call` takes it."""
    k_cache, v_cache, page_table, kv_lengths, query_starts = PagedBatch.of(*paged)
    (T, N, H), K = q.shape, k_cache.shape[1]
    tile = TILE // (N // K)
    _, tile_at = split_queries(query_starts, tile)
    # As many tiles as there may be: a full one for each `tile` queries, and one for each sequence's rest.
    at = jnp.arange(T // tile + kv_lengths.size, dtype=jnp.int32)
    owners, firsts = tile_at(at)
    run = pl.pallas_call(
        partial(_ragged_kernel, scale=H**-0.5 if scale is None else scale, **options),
        grid=(at.size, K),
        out_shape=jax.ShapeDtypeStruct((T, K, N // K, H), jnp.float32),
        compiler_params=plgpu.CompilerParams(**PARAMETERS),
        interpret=interpret,
        name="paged_attention",
    )
    integers = (x.astype(jnp.int32) for x in (owners, firsts, page_table, kv_lengths, query_starts))
    out = run(*integers, q.reshape(T, K, N // K, H), *jax.tree.leaves((k_cache, v_cache))).reshape(T, N, H)
    return jnp.where((jnp.arange(T) < query_starts[-1])[:, None, None], out, 0.0)


def _ragged_kernel(
    owners: Any,
    firsts: Any,
    table: Any,
    lengths: Any,
    starts: Any,
    q: Any,
    *refs: Any,
    scale: float,
    window: int | None = None,
    **options: Any,
) -> None:
    *caches, out = refs
    G, H = q.shape[2:]
    i, h = pl.program_id(0), pl.program_id(1)
    b, first = owners[i], firsts[i]
    length, end = lengths[b], starts[b + 1]
    rows, size = jnp.arange(TILE), jnp.arange(H)[None]
    token, head = first + rows // G, rows % G
    own = (token < end) & (rows < TILE // G * G)
    last = jnp.where(own, length - end + token, -1)
    lowest = 0 if window is None else jnp.maximum(length - end + first - window + 1, 0)
    # A tile after the last one has no queries, and reads no keys.
    keys = lowest, jnp.where(first < end, jnp.minimum(length - end + first + TILE // G, length), 0)
    places = token[:, None], h, head[:, None], size
    queries = _load_queries(q.at[places], own[:, None], scale, caches)
    _, sums, acc = _attend(queries, caches, table, b, h, keys, last, window, **options)
    plgpu.store(out.at[places], acc / _divisors(sums)[:, None], mask=own[:, None])


def _load_queries(places: Any, mask: Array, scale: float, caches: Sequence[Any]) -> Array:
    """Scaled queries, rounded to the dtype of products with the caches."""
    dtype = jnp.bfloat16 if is_quantized(caches[0].dtype) else caches[0].dtype
    return (plgpu.load(places, mask=mask, other=0.0).astype(jnp.float32) * scale).astype(dtype)


def _attend(
    queries: Array,
    caches: Sequence[Any],
    table: Any,
    b: Any,
    h: Any,
    keys: tuple[Any, Any],
    last: Array,
    window: int | None,
    soft_cap: float | None = None,
) -> tuple[Array, Array, Array]:
    """Highest score, sum of weights and weighted sum of values of each query, `[M]`, `[M]` and `[M, H]`.

    Args:
        queries: `[M, H]`, of the sequence `b` and the key/value head `h`.
        caches: pages of keys and of values, each with its scales if it has any.
        keys: positions that may be seen, the first and the last but one.
        last: last position that each query sees, `[M]`; -1 for none.
    """
    k_pages, *k_scales = caches[: len(caches) // 2]
    v_pages, *v_scales = caches[len(caches) // 2 :]
    p, (M, H) = k_pages.shape[2], queries.shape
    begin, end = keys

    def body(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, sums, acc = carry
        at = begin + i * BLOCK + jnp.arange(BLOCK)
        there = at < end
        pages, offsets = plgpu.load(table.at[b, at // p], mask=there, other=0), at % p

        def load(cache: Any) -> Array:
            places = pages[:, None], h, offsets[:, None], jnp.arange(H)[None]
            rows = plgpu.load(cache.at[places], mask=there[:, None], other=jnp.zeros((), cache.dtype))
            if cache.dtype == jnp.float8_e4m3fn:  # straight to bfloat16 takes an instruction of a sixteenth of the rate
                rows = rows.astype(jnp.float32)
            return rows.astype(queries.dtype)

        def load_scales(cache: Any) -> Array:
            return plgpu.load(cache.at[pages, h, offsets], mask=there, other=0.0)[None]

        k = load(k_pages)
        scores = plgpu.dot(queries, k, trans_b=True, precision=exact_products(k))
        for scales in k_scales:
            scores *= load_scales(scales)
        visible = there[None] & (at[None] <= last[:, None])
        if window is not None:
            visible &= at[None] > last[:, None] - window
        scores = jnp.where(visible, soft_capped(scores, soft_cap), MASKED)
        now = jnp.maximum(highest, scores.max(1))
        weights, shrink = jnp.where(visible, jnp.exp(scores - now[:, None]), 0.0), jnp.exp(highest - now)
        sums = sums * shrink + weights.sum(1)
        for scales in v_scales:
            weights *= load_scales(scales)
        v = load(v_pages)
        return now, sums, acc * shrink[:, None] + plgpu.dot(weights.astype(v.dtype), v, precision=exact_products(v))

    start = jnp.full((M,), MASKED, jnp.float32), jnp.zeros((M,), jnp.float32), jnp.zeros((M, H), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(jnp.maximum(end - begin, 0), BLOCK), body, start)


def _accepts_writes(k_cache: Any, v_cache: Any, k: Any, v: Any, *_: Any) -> bool:
    return k_cache.shape[1] <= MOST_QUERIES and k.size > 0 and _takes_pages(k_cache, v_cache)


@write_pages.implementation("triton", **KERNEL, accepts=_accepts_writes)
def write_tokens(
    k_cache: Pages,
    v_cache: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Int[Array, "T"],
    offsets: Int[Array, "T"],
    *,
    interpret: bool = False,
) -> tuple[Pages, Pages]:
    """`ops.write_pages`, in place and in one launch; `interpret` as `pallas_call` takes it.

    On an H100, XLA's two scatters take three times as long for 2,048 tokens of eight heads, and twice for 4 tokens.
    """
    caches, tree = jax.tree.flatten((k_cache, v_cache))
    run = pl.pallas_call(
        _write_kernel,
        grid=(k.shape[0],),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        input_output_aliases={4 + i: i for i in range(len(caches))},
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="write_pages",
    )
    return jax.tree.unflatten(tree, run(k, v, pages.astype(jnp.int32), offsets.astype(jnp.int32), *caches))


def _write_kernel(k: Any, v: Any, pages: Any, offsets: Any, *refs: Any) -> None:
    caches = refs[len(refs) // 2 :]  # the same memory as the first half
    t, (P, K, p, H) = pl.program_id(0), caches[0].shape
    page, offset = pages[t], offsets[t]
    heads, size = jnp.arange(pl.next_power_of_2(K)), jnp.arange(H)[None]
    there = (heads < K) & (page >= 0) & (page < P) & (offset >= 0) & (offset < p)
    halves = caches[: len(caches) // 2], caches[len(caches) // 2 :]
    for x, (cache, *scales) in zip((k, v), halves, strict=True):
        values = plgpu.load(x.at[t, heads[:, None], size], mask=(heads < K)[:, None], other=0.0).astype(jnp.float32)
        if scales:
            values, factors = _quantized(values, cache.dtype)
            plgpu.store(scales[0].at[page, heads, offset], factors, mask=there)
        plgpu.store(cache.at[page, heads[:, None], offset, size], values.astype(cache.dtype), mask=there[:, None])


def _quantized(x: Array, dtype: Any) -> tuple[Array, Array]:
    """`ops.paged.quantize_tokens` of `[K, H]`, by what Triton has. The scale of a NaN is infinite."""
    limit = LARGEST[jnp.dtype(dtype)]
    largest = jnp.where(x == x, jnp.abs(x), jnp.inf).max(1)
    scales = largest * (np.float32(1) / np.float32(limit))
    usable = (scales >= SMALLEST) & (scales < jnp.inf)
    values = jnp.where(usable[:, None], x * (1 / jnp.where(usable, scales, 1.0))[:, None], 0.0)
    if jnp.dtype(dtype) != jnp.int8:
        return jnp.clip(values, -limit, limit), scales
    below = jnp.floor(values)  # jnp.round, halves to even, is not among what Pallas lowers to Triton
    odd, rest = below != 2 * jnp.floor(below / 2), values - below
    return below + jnp.where((rest > 0.5) | ((rest == 0.5) & odd), 1.0, 0.0), scales
