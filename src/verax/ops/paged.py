"""Attention over a paged key/value cache (Kwon et al., 2023, arXiv:2309.06180): decode steps and ragged mixed steps.

The cache of a layer is `[P, K, p, H]`: P pages of p tokens, head-major inside a page, so that one head's tokens lie
together. Page 0 belongs to no sequence: padding is written there. A row of the page table lists a sequence's pages.
Pages may be int8 or float8 (`QuantizedPages`): quantised as they are written, their scales applied to scores and
softmax weights.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float8e4m3fn, Float32, Int, Int8

from verax.errors import InvalidParameterError
from verax.ops._dispatch import Example, bfloat16, check_integers, check_shapes, float32, int32, operation
from verax.ops.attention import (
    MASKED,
    ScoreOptions,
    check_heads,
    check_scores,
    float32_product,
    soft_capped,
    softmax_with_sinks,
)

# vLLM's float8 cache has a scale of 1.0. Here float8 has scales as int8 has. Relative error of attention over 2,000
# random tokens, heads of 128: 0.063 with scales, 0.077 without; 0.070 and 0.31 for values of 0.002, which float8 can
# hardly represent; 0.073 and 0.22 with a few channels past 448. They cost 4 bytes for 128.
LARGEST: dict[np.dtype, int] = {np.dtype(jnp.int8): 127, np.dtype(jnp.float8_e4m3fn): 448}
"""Magnitude that a row's largest number is given, by dtype of pages with scales: the largest finite one."""

SMALLEST = np.finfo(np.float32).tiny
"""Least scale that is divided by: reciprocals of smaller ones may overflow, and processors may take them for 0."""


class QuantizedPages(NamedTuple):
    """Quantised pages in the place of floats: token s of head k is `values[.., k, s, :] * scales[.., k, s]`."""

    values: Int8[Array, "P K p H"] | Float8e4m3fn[Array, "P K p H"]
    scales: Float32[Array, "P K p"]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(P, K, p, H)`, as of the array that this stands for."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """int8 or float8_e4m3fn."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


Pages = Float[Array, "P K p H"] | QuantizedPages


def is_quantized(dtype: DTypeLike) -> bool:
    """True if pages of this dtype have scales."""
    return jnp.dtype(dtype) in LARGEST


def new_pages(shape: tuple[int, int, int, int], dtype: DTypeLike) -> Pages:
    """Zeroed pages `(P, K, p, H)` of float32, bfloat16, int8 or float8_e4m3fn.

    On a CPU under Linux, a page takes memory when it is first written.
    """
    if is_quantized(dtype):
        return QuantizedPages(_zeros(shape, dtype), _zeros(shape[:3], jnp.float32))
    return _zeros(shape, dtype)


def _zeros(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    zeros = jnp.zeros(shape, dtype)
    if sys.platform != "linux" or isinstance(zeros, Tracer) or any(x.platform != "cpu" for x in zeros.devices()):
        return zeros
    # The memory of a large array is private to it and anonymous: given back, it reads as zeros when it is next touched.
    start = zeros.block_until_ready().unsafe_buffer_pointer()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + zeros.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
    return zeros


def page_bytes(shape: tuple[int, int, int], dtype: DTypeLike) -> int:
    """Bytes of one page `(K, p, H)`, scales included."""
    K, p, H = shape
    scale = 4 if is_quantized(dtype) else 0
    return K * p * (H * jnp.dtype(dtype).itemsize + scale)


def quantize_tokens(
    x: Float[Array, "*B H"], dtype: DTypeLike = jnp.int8
) -> tuple[Int8[Array, "*B H"] | Float8e4m3fn[Array, "*B H"], Float32[Array, "*B"]]:
    """Round each row to int8 or float8_e4m3fn times its scale: the row's largest magnitude / 127, or / 448.

    A row with a number that is not finite gets a scale that is not, so that what it is multiplied with becomes NaN.
    """
    x, limit = x.astype(jnp.float32), LARGEST[jnp.dtype(dtype)]
    # XLA:CPU's maximum may pass over a NaN.
    largest = jnp.where(jnp.any(jnp.isnan(x), axis=-1), jnp.nan, jnp.max(jnp.abs(x), axis=-1))
    # Compilers may turn a division by a constant into this product or not; the product has the same bits everywhere.
    scales = largest * (np.float32(1) / np.float32(limit))
    usable = ((scales >= SMALLEST) & jnp.isfinite(scales))[..., None]
    values = jnp.where(usable, x * (1 / jnp.where(usable, scales[..., None], 1)), 0)
    # Float8 has no infinity: a number past its largest would become NaN.
    values = jnp.round(values) if jnp.dtype(dtype) == jnp.int8 else jnp.clip(values, -limit, limit)
    return values.astype(dtype), scales


def gather_pages(
    cache: Pages, pages: Int[Array, "*B W"]
) -> tuple[Float[Array, "*B K s H"], Float32[Array, "*B K s"] | None]:
    """Tokens of a list of pages, in order (s = W p), and their scales, or None for floats.

    The scales are not multiplied in yet. Values with scales come as bfloat16, which holds them exactly.
    """
    if isinstance(cache, QuantizedPages):
        return _in_order(cache.values, pages).astype(jnp.bfloat16), gather_scales(cache, pages)
    return _in_order(cache, pages), None


def gather_scales(cache: QuantizedPages, pages: Int[Array, "*B W"]) -> Float32[Array, "*B K s"]:
    """Scales of the tokens of a list of pages, in order."""
    return _in_order(cache.scales[..., None], pages)[..., 0]


def _in_order(cache: Array, pages: Int[Array, "*B W"]) -> Array:
    """`[*B K s n]` of `[P K p n]`."""
    taken = jnp.moveaxis(cache[pages], -3, -4)
    return taken.reshape(*taken.shape[:-3], pages.shape[-1] * cache.shape[2], taken.shape[-1])


KV_CHUNK = 128
"""Cached tokens taken at a time by the chunked implementations: the best of 64..512 on a CPU at 8 heads of 128."""

QUERY_TILE = 32
"""Queries of one sequence taken at a time in a ragged step: a shorter prompt chunk pads to it."""


def _check_write(k_cache: Pages, v_cache: Pages, k: Any, v: Any, pages: Any, offsets: Any) -> None:
    T, (_, K, _, H) = len(k), k_cache.shape
    check_shapes(v_cache=(v_cache, k_cache.shape), k=(k, (T, K, H)), v=(v, (T, K, H)))
    check_shapes(pages=(pages, (T,)), offsets=(offsets, (T,)))
    check_integers(pages=pages, offsets=offsets)


@operation(check=_check_write)
def write_pages(
    k_cache: Pages,
    v_cache: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Int[Array, "T"],
    offsets: Int[Array, "T"],
) -> tuple[Pages, Pages]:
    """Write token t's keys and values to `offsets[t]` in `pages[t]`, in the caches' dtype. Donate the caches.

    Tokens whose page or offset does not exist, such as vLLM's -1 for padding, are not written.
    """
    places = pages, slice(None), offsets
    return _written(k_cache, k, places), _written(v_cache, v, places)


def _written(cache: Pages, x: Float[Array, "T K H"], places: tuple[Any, ...]) -> Pages:
    if isinstance(cache, QuantizedPages):
        values, scales = quantize_tokens(x, cache.dtype)
        return QuantizedPages(_set(cache.values, places, values), _set(cache.scales, places, scales))
    return _set(cache, places, x.astype(cache.dtype))


def _set(array: Array, places: tuple[Any, ...], values: Array) -> Array:
    return jnp.asarray(array).at[places].set(values, mode="drop", wrap_negative_indices=False)


# XLA:TPU scatters many tokens into a copy of all pages whose heads follow the offsets, and copies that back: 1.1 GB
# of traffic to write 2048 tokens into 256 MiB of pages. With an index for the head as well it writes rows in place,
# 88 MB, and pages that a mesh divides by head stay divided.
@write_pages.implementation("by_head", platforms=("tpu",))
def _write_by_head(
    k_cache: Pages,
    v_cache: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Int[Array, "T"],
    offsets: Int[Array, "T"],
) -> tuple[Pages, Pages]:
    places = pages[:, None], jnp.arange(k.shape[1])[None], offsets[:, None]
    return _written(k_cache, k, places), _written(v_cache, v, places)


def _check(
    q: Any,
    k_cache: Pages,
    v_cache: Pages,
    page_table: Any,
    kv_lengths: Any,
    query_starts: Any = None,
    **options: Unpack[ScoreOptions],
) -> None:
    (_, K, _, H), B = k_cache.shape, len(page_table)
    T, N = q.shape[0] if query_starts is not None else B, q.shape[1]
    check_shapes(q=(q, (T, N, H)), v_cache=(v_cache, k_cache.shape), kv_lengths=(kv_lengths, (B,)))
    if np.ndim(page_table) != 2:
        raise InvalidParameterError(f"page_table: expected shape [B, W], got {list(np.shape(page_table))}")
    check_shapes(query_starts=(query_starts, (B + 1,)))
    check_integers(page_table=page_table, kv_lengths=kv_lengths, query_starts=query_starts)
    check_heads(N, K, **options)


@operation(check=_check)
def paged_attention(
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
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of a ragged batch: sequence b's queries are rows `query_starts[b] : query_starts[b + 1]`.

    They are the *last* tokens of the `kv_lengths[b]` tokens that its pages hold, their own keys included. Rows past
    `query_starts[-1]` are padding and come out zero.

    Args:
        q: queries of all sequences, one after the other.
        k_cache, v_cache: the layer's pages, both of one dtype. Queries and softmax weights are rounded to it; with
            quantised pages, to bfloat16, or not at all where that is not faster.
        page_table: pages of each sequence in order; entries past its length are never read as visible.
        kv_lengths: tokens of each sequence in the cache, 0 for a padding row.
        query_starts: `[B + 1]` ascending offsets into `q`.
        scale: factor on the scores; `H ** -0.5` if None.
        window: keys that a query sees, its own the last of them: position i sees i - window < j <= i. Pages whose keys
            all lie before it are not read; their entries in the table may be any pages.
        soft_cap: bound of the scores, see `ops.attention`.
        sinks: score of one more key for each query head, see `ops.attention`.

    Returns:
        Float32. The reference holds `O(T W p)` keys; use it for small shapes.

    Raises:
        InvalidParameterError: for a window or a soft cap that is not above 0, or arrays that do not fit each other.
    """
    check_scores(window, soft_cap)
    T, N, H = q.shape
    B, W = page_table.shape
    if T * B * W == 0:
        return jnp.zeros((T, N, H), jnp.float32)
    page_table, kv_lengths, query_starts = PagedBatch.of(k_cache, v_cache, page_table, kv_lengths, query_starts)[2:]
    p = k_cache.shape[2]
    rows = jnp.arange(T)
    owner = jnp.clip(jnp.searchsorted(query_starts, rows, side="right") - 1, 0, B - 1)
    position = kv_lengths[owner] - query_starts[owner + 1] + rows
    keys = jnp.arange(W * p)
    visible = _visible(keys, position[:, None], window) & (rows < query_starts[-1])[:, None]
    k, v = (_dequantized(*gather_pages(cache, page_table[owner])) for cache in (k_cache, v_cache))
    v = jnp.where(visible[:, None, :, None], v, 0)  # another sequence may have left NaN in a page
    grouped = group_queries(q, k.shape[1], scale).astype(k.dtype)
    scores = float32_product("tkgh,tksh->tkgs", grouped, k)
    scores = jnp.where(visible[:, None, None], soft_capped(scores, soft_cap), MASKED)
    weights = softmax_with_sinks(scores, None if sinks is None else sinks.reshape(k.shape[1], -1))
    out = float32_product("tkgs,tksh->tkgh", weights.astype(v.dtype), v)
    return jnp.where((rows < query_starts[-1])[:, None, None], out.reshape(T, N, H), 0.0)


class PagedBatch(NamedTuple):
    """Arrays of a call of `paged_attention` after its queries."""

    k_cache: Pages
    v_cache: Pages
    page_table: Int[Array, "B W"]
    kv_lengths: Int[Array, "B"]
    query_starts: Any = None
    """`[B + 1]`; None in a decode step."""

    @classmethod
    def of(cls, k_cache: Pages, v_cache: Pages, *integers: Int[Array, "..."]) -> PagedBatch:
        """The arrays of a call, with integers as int32: differences of unsigned ones are not negative."""
        return cls(k_cache, v_cache, *(x.astype(jnp.int32) for x in integers))


@operation(check=_check)
def paged_decode_attention(
    q: Float[Array, "B N H"],
    k_cache: Pages,
    v_cache: Pages,
    page_table: Int[Array, "B W"],
    kv_lengths: Int[Array, "B"],
    **options: Unpack[ScoreOptions],
) -> Float[Array, "B N H"]:
    """`paged_attention` where every sequence has one query, its newest token: the decode step. Padding rows give 0."""
    B = q.shape[0]
    starts = jnp.arange(B + 1, dtype=jnp.int32)
    out = paged_attention.reference(q, k_cache, v_cache, page_table, kv_lengths, starts, **options)
    return jnp.where((kv_lengths > 0)[:, None, None], out, 0.0)


def _visible(keys: Int[Array, "..."], last: Int[Array, "..."], window: int | None) -> Bool[Array, "..."]:
    """True for keys that a query sees whose last key is `last`."""
    visible = keys <= last
    return visible if window is None else visible & (keys > last - window)


def _dequantized(x: Float[Array, "*B s H"], scales: Float[Array, "*B s"] | None) -> Float[Array, "*B s H"]:
    return x if scales is None else x.astype(jnp.float32) * scales[..., None]


def group_queries(q: Float[Array, "*B N H"], K: int, scale: float | None) -> Float[Array, "*B K G H"]:
    """Queries by the key/value head that they read, scaled."""
    H = q.shape[-1]
    grouped = (q * (H**-0.5 if scale is None else scale)).reshape(*q.shape[:-2], K, q.shape[-2] // K, H)
    return grouped


def num_up_to(ascending: Int[Array, "m"], values: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Number of entries that are not above each value; all are compared, because a search is a loop on accelerators."""
    return jnp.searchsorted(ascending, values, side="right", method="compare_all")


def split_queries(
    query_starts: Int[Array, "C"], tile: int
) -> tuple[Int[Array, ""], Callable[[Int[Array, "*n"]], tuple[Int[Array, "*n"], Int[Array, "*n"]]]]:
    """Number of tiles of a ragged batch, and a function from tiles to their sequences and first queries.

    A tile past the last one has the last sequence, and a first query after it.

    `query_starts`: see `paged_attention`.
    """
    counts = query_starts[1:] - query_starts[:-1]
    before = jnp.concatenate([jnp.zeros(1, counts.dtype), jnp.cumsum((counts + tile - 1) // tile)])

    def tile_at(i: Int[Array, "*n"]) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
        b = jnp.minimum(num_up_to(before, i) - 1, counts.size - 1)
        return b, query_starts[b] + (i - before[b]) * tile

    return before[-1], tile_at


def are_alike(k_cache: Any, v_cache: Any) -> bool:
    """True for keys and values of one kind, dtype and shape."""
    return type(k_cache) is type(v_cache) and k_cache.dtype == v_cache.dtype and k_cache.shape == v_cache.shape


def operand_dtype(cache: Pages) -> DTypeLike:
    """Dtype of the operands of products with a cache."""
    return jnp.bfloat16 if isinstance(cache, QuantizedPages) else cache.dtype


def _attend_chunks(
    grouped: Float[Array, "B K G H"],
    caches: tuple[Pages, Pages],
    page_table: Int[Array, "B W"],
    last_visible: Int[Array, "B G"],
    num_keys: Int[Array, ""],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    **_: object,
) -> Float[Array, "B K G H"]:
    """Online softmax over chunks of the cache; query (b, g) sees keys up to `last_visible[b, g]`, -1 for none.

    Only as many chunks are read as the longest sequence needs, whatever the width of the table, and none before the
    first window. A sink is a key before all others: the softmax begins with its score and no value.
    """
    check_scores(window, soft_cap)
    k_cache, v_cache = caches
    B, K, G, H = grouped.shape
    p = k_cache.shape[2]
    pages = max(1, min(KV_CHUNK // p, page_table.shape[1]))
    chunk = pages * p
    # A whole number of chunks: a last slice that was clamped to the table's end would read keys twice.
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))

    def body(
        i: Int[Array, ""], carry: tuple[Float[Array, "B K G"], Float[Array, "B K G"], Float[Array, "B K G H"]]
    ) -> tuple[Float[Array, "B K G"], Float[Array, "B K G"], Float[Array, "B K G H"]]:
        highest, total, out = carry
        listed = lax.dynamic_slice_in_dim(page_table, i * pages, pages, axis=1)
        (k, k_scales), (v, v_scales) = gather_pages(k_cache, listed), gather_pages(v_cache, listed)
        scores = float32_product("bkgh,bksh->bkgs", grouped, k)
        if k_scales is not None:
            scores = scores * k_scales[:, :, None]
        visible = _visible(i * chunk + jnp.arange(chunk), last_visible[:, :, None], window)
        scores = jnp.where(visible[:, None], soft_capped(scores, soft_cap), MASKED)
        new_highest = jnp.maximum(highest, scores.max(-1))
        # A chunk with no visible key leaves everything as it was, instead of counting exp(0) for each masked one.
        weights = jnp.where(visible[:, None], jnp.exp(scores - new_highest[..., None]), 0.0)
        shrink = jnp.exp(highest - new_highest)
        scaled = weights if v_scales is None else jnp.where(visible[:, None], weights * v_scales[:, :, None], 0.0)
        # NaN that another sequence left in a page would not be hidden by a weight of 0.
        v = jnp.where(visible.any(1)[:, None, :, None], v, 0)
        update = float32_product("bkgs,bksh->bkgh", scaled.astype(v.dtype), v)
        return new_highest, total * shrink + weights.sum(-1), out * shrink[..., None] + update

    highest = jnp.full((B, K, G), MASKED, jnp.float32)
    if sinks is not None:  # rows are head by head, several of each
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(K, -1), K * G // sinks.size, axis=1)
        highest = jnp.broadcast_to(sinks, highest.shape)
    total = jnp.full((B, K, G), sinks is not None, jnp.float32)
    start = highest, total, jnp.zeros((B, K, G, H), jnp.float32)
    first = 0
    if window is not None:
        begin = jnp.where(last_visible >= 0, last_visible - (window - 1), num_keys)
        first = jnp.maximum(begin.min(), 0) // chunk
    _, total, out = lax.fori_loop(first, (num_keys + chunk - 1) // chunk, body, start)
    return out / jnp.where(total > 0, total, 1.0)[..., None]


def _has_keys(q: Any, k_cache: Any, v_cache: Any, page_table: Any, *_: Any, **__: Any) -> bool:
    return q.shape[0] * math.prod(page_table.shape) > 0


@paged_decode_attention.implementation("chunked", accepts=_has_keys)
def _paged_decode_attention_chunked(
    q: Float[Array, "B N H"], *paged: Any, **options: Unpack[ScoreOptions]
) -> Float[Array, "B N H"]:
    k_cache, v_cache, page_table, kv_lengths, _ = PagedBatch.of(*paged)
    B, N, H = q.shape
    K = k_cache.shape[1]
    G = N // K
    grouped = group_queries(q, K, options.get("scale")).astype(operand_dtype(k_cache))
    if G == 1:  # XLA:CPU multiplies one row an order slower than two
        grouped = jnp.concatenate([grouped, grouped], axis=2)
    last = jnp.broadcast_to(kv_lengths[:, None] - 1, (B, grouped.shape[2]))
    out = _attend_chunks(grouped, (k_cache, v_cache), page_table, last, kv_lengths.max(), **options)
    return out[:, :, :G].reshape(B, N, H)


@paged_attention.implementation("tiled", accepts=_has_keys)
def _paged_attention_tiled(
    q: Float[Array, "T N H"], *paged: Any, **options: Unpack[ScoreOptions]
) -> Float[Array, "T N H"]:
    k_cache, v_cache, page_table, kv_lengths, query_starts = PagedBatch.of(*paged)
    # for each sequence, for each tile of its queries (as many as there are, not as many as fit):
    #     for each chunk of the keys that the tile can see: online softmax
    T, N, H = q.shape
    K = k_cache.shape[1]
    G = N // K
    tile = min(QUERY_TILE, T)
    grouped = group_queries(q, K, options.get("scale")).astype(operand_dtype(k_cache))  # [T, K, G, H]
    grouped = jnp.pad(grouped, ((0, tile), (0, 0), (0, 0), (0, 0)))
    num_tiles, tile_at = split_queries(query_starts, tile)

    def body(i: Int[Array, ""], out: Float[Array, "t K G H"]) -> Float[Array, "t K G H"]:
        b, first = tile_at(i)
        rows = first + jnp.arange(tile)
        own = rows < query_starts[b + 1]
        position = kv_lengths[b] - query_starts[b + 1] + rows
        queries = lax.dynamic_slice_in_dim(grouped, first, tile)  # [tile, K, G, H]
        queries = jnp.transpose(queries, (1, 2, 0, 3)).reshape(1, K, G * tile, H)
        last = jnp.tile(jnp.where(own, position, -1), G)[None]
        seen = jnp.minimum(kv_lengths[b], kv_lengths[b] - query_starts[b + 1] + first + tile)
        result = _attend_chunks(queries, (k_cache, v_cache), page_table[b][None], last, seen, **options)
        result = jnp.transpose(result.reshape(K, G, tile, H), (2, 0, 1, 3))
        # Rows past this sequence's end belong to the next one, whose tile comes later and writes them again.
        return lax.dynamic_update_slice_in_dim(out, result, first, axis=0)

    out = lax.fori_loop(0, num_tiles, body, jnp.zeros((T + tile, K, G, H), jnp.float32))
    return out[:T].reshape(T, N, H)


_CACHE = bfloat16(64, 8, 16, 128)
paged_attention.examples = [Example((float32(32, 16, 128), _CACHE, _CACHE, int32(4, 8), int32(4), int32(5)))]
paged_decode_attention.examples = [Example((float32(4, 16, 128), _CACHE, _CACHE, int32(4, 8), int32(4)))]
write_pages.examples = [Example((_CACHE, _CACHE, float32(4, 8, 128), float32(4, 8, 128), int32(4), int32(4)))]
