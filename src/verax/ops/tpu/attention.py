"""Attention on TPUs: by JAX's own kernel, splash attention (`jax.experimental.pallas.ops.tpu`), and over pages by
Pallas: pages come from HBM while those before them are multiplied.

For splash attention, sequences are padded to whole blocks, and heads come first, both of which XLA copies. The padding
has segments of its own, so that no query sees it. Over pages:

    for each tile of a sequence's queries:
        for each chunk of pages that one of them sees:
            start the copies of the next chunk's pages into the other buffer, wait for this chunk's
            for each key/value head: online softmax of the tile's queries over the chunk
        the tile's result

In a decode step a tile is a sequence's only query, in a ragged step up to `TILE` rows, queries times heads that share a
key/value head. One page is one copy, all heads of it. The chunks of all tiles are one list (`_Work`), so that a tile's
first chunk is copied while the last one of the tile before it is multiplied. Keys that no query of the tile sees may be
anything: their scores are masked, and their values cleared. Quantised pages become bfloat16 on their way to a product.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Int

from verax.ops._dispatch import replaced_by
from verax.ops.attention import MASKED, are_numbers, attention, soft_capped
from verax.ops.paged import (
    PagedBatch,
    Pages,
    QuantizedPages,
    are_alike,
    gather_scales,
    group_queries,
    num_up_to,
    operand_dtype,
    paged_attention,
    paged_decode_attention,
    split_queries,
)
from verax.ops.tpu import KERNEL, pl, pltpu, product

LANES, SUBLANES = 128, 8
"""Size of a register of 32-bit numbers; one of 16-bit numbers has twice as many sublanes. Splash attention's blocks are
multiples of the lanes."""

QUERIES, KEYS, KEYS_AT_ONCE = 512, 1024, 512
"""Queries of a tile, keys of a block, and keys that are multiplied at once: estimates, tuned on no device."""

HEAD_SIZES = (64, 128, 256)


def _accepts(q: Any, k: Any, v: Any, *, causal: bool = True, window: int | None = None, **options: Any) -> bool:
    sizes = q.shape[-1] in HEAD_SIZES and min(q.size, k.size) > 0 and q.shape[2] % k.shape[2] == 0
    # Otherwise some queries see nothing.
    visible = k.shape[1] >= q.shape[1] or not (causal or window is not None)
    # It rounds products of float32.
    plain = options.get("sinks") is None and are_numbers(window=window, **options)
    return sizes and k.dtype == v.dtype == jnp.bfloat16 and visible and plain


@attention.implementation(
    "splash", platforms=("tpu",), single_device=True, accepts=_accepts, traits={"flash"}, experimental=True
)
def _attention_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    segments: Int[Array, "B T"] | None = None,
    **options: Any,
) -> Float[Array, "B T N H"]:
    # The derivative needs the softmax, which the kernel does not write out.
    without_kernel = attention.restricted()  # the preferred one that is not experimental

    def reference(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        return without_kernel(q, k, v, segments=segments, **options)

    return replaced_by(reference, partial(splash_attention, **options), q, k, v, segments)


def splash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segments: Int[Array, "B T"] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`ops.attention`, where each query sees a key; with `interpret` as `pallas_call` takes it."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # Pallas takes half a second to import

    (B, T, N, H), S = q.shape, k.shape[1]
    padded = [-(-length // LANES) * LANES for length in (T, S)]
    rows, columns = (min(block, length) for block, length in zip((QUERIES, KEYS), padded, strict=True))
    shape = -(-T // rows) * rows, -(-S // columns) * columns
    mask: Any = splash.FullMask(shape)
    if window is not None:
        mask = splash.LocalMask(shape, (window - 1, 0 if causal else window - 1), S - T)
    elif causal:
        mask = splash.CausalMask(shape, S - T)
    kernel = splash.make_splash_mha(
        mask=splash.MultiHeadMask([mask] * N),
        block_sizes=splash.BlockSizes(rows, columns, LANES if columns % KEYS_AT_ONCE else KEYS_AT_ONCE),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )
    heads_first = [
        jnp.pad(jnp.swapaxes(x.astype(k.dtype), 1, 2), ((0, 0), (0, 0), (0, length - x.shape[1]), (0, 0)))
        for x, length in ((q * (H**-0.5 if scale is None else scale), shape[0]), (k, shape[1]), (v, shape[1]))
    ]
    owners = [jnp.zeros((B, length), jnp.int32) if segments is None else segments for length in (T, S)]
    owners = [
        jnp.pad(x.astype(jnp.int32), ((0, 0), (0, length - x.shape[1])), constant_values=-1)
        for x, length in zip(owners, shape, strict=True)
    ]
    # A padded query sees padded keys where there are any, and its result is cut off in any case.
    out: Any = jax.vmap(kernel)(*heads_first, splash.SegmentIds(*owners))
    return jnp.swapaxes(out, 1, 2)[:, :T].astype(jnp.float32)


BUFFER = 1 << 20
"""Bytes of keys in a chunk. Keys and values have two buffers each: 4 MiB of the 16 MiB that XLA gives to a kernel."""

TILE = 64
"""Rows of a tile of a ragged batch."""


class _Tiles(NamedTuple):
    """Tiles of queries.

    `positions`: position of each tile's first query in its sequence. `counts`: queries of each; 0 for a tile that is
    not used.
    """

    sequences: Int[Array, "n"]
    positions: Int[Array, "n"]
    counts: Int[Array, "n"]


class _Work(NamedTuple):
    """Chunks that the kernel walks through.

    `ends`: number of chunks of the tiles up to each, the first tile included.
    """

    owners: Int[Array, "m"]
    chunks: Int[Array, "m"]
    ends: Int[Array, "n"]


def pages_of_chunk(k_cache: Pages) -> int:
    """Pages of a chunk: whole registers of scores, and keys of at most `BUFFER` bytes."""
    _, K, p, H = k_cache.shape
    step = max(1, LANES // p)
    return max(1, BUFFER // (K * p * H * k_cache.dtype.itemsize * step)) * step


PAGE_MULTIPLES = {"float32": 8, "bfloat16": 16, "int8": 16, "float8_e4m3fn": 16}
"""Tokens of a page are a multiple of them, by dtype of the pages, so that the tokens of several pages lie together."""

MAX_TABLE = 1 << 17
"""Entries of the page table, which lies in scalar memory."""

MAX_HEADS, MAX_GROUP = 32, 64
"""Key/value heads, and queries of one of them, for whose tiles there is vector memory."""


def _accepts_pages(q: Any, k_cache: Any, v_cache: Any, page_table: Any, *_: Any, **options: Any) -> bool:
    _, K, p, H = k_cache.shape
    tiled = str(k_cache.dtype) in PAGE_MULTIPLES and H % LANES == 0 and p % PAGE_MULTIPLES[str(k_cache.dtype)] == 0
    tiled = tiled and (LANES % p == 0 or p % LANES == 0)  # scores of some pages are whole registers
    fits = K * H <= MAX_HEADS * LANES and q.shape[1] // K <= MAX_GROUP and math.prod(page_table.shape) <= MAX_TABLE
    plain = options.get("sinks") is None and are_numbers(**options)
    return tiled and are_alike(k_cache, v_cache) and fits and q.size > 0 and plain


@paged_decode_attention.implementation("pallas", **KERNEL, accepts=_accepts_pages)
def decode_attention(
    q: Float[Array, "B N H"], *paged: Any, scale: float | None = None, **options: Any
) -> Float[Array, "B N H"]:
    """`ops.paged_decode_attention`; with the options of `_attend`."""
    k_cache, v_cache, page_table, kv_lengths, _ = PagedBatch.of(*paged)
    B, N, H = q.shape
    queries = group_queries(q, k_cache.shape[1], scale).astype(operand_dtype(k_cache))
    tiles = _Tiles(jnp.arange(B, dtype=jnp.int32), kv_lengths - 1, jnp.minimum(kv_lengths, 1))
    return _attend(queries, k_cache, v_cache, page_table, tiles, group=N // k_cache.shape[1], **options).reshape(
        B, N, H
    )


@paged_attention.implementation("pallas", **KERNEL, accepts=_accepts_pages)
def ragged_attention(
    q: Float[Array, "T N H"], *paged: Any, scale: float | None = None, **options: Any
) -> Float[Array, "T N H"]:
    """`ops.paged_attention`; with the options of `_attend`."""
    k_cache, v_cache, page_table, kv_lengths, query_starts = PagedBatch.of(*paged)
    (T, N, H), K, B = q.shape, k_cache.shape[1], kv_lengths.size
    G = N // K
    tile = TILE // G
    _, tile_at = split_queries(query_starts, tile)
    # As many tiles as there may be: a full one for each `tile` queries, and one for each sequence's rest.
    b, first = tile_at(jnp.arange(T // tile + B, dtype=jnp.int32))
    ends = query_starts[b + 1]
    counts = jnp.clip(ends - first, 0, tile)
    tiles = _Tiles(*(x.astype(jnp.int32) for x in (b, kv_lengths[b] - ends + first, counts)))
    rows = first[:, None] + jnp.arange(tile)
    queries = group_queries(q, K, scale).astype(operand_dtype(k_cache))[jnp.minimum(rows, T - 1)]
    queries = jnp.moveaxis(queries, 1, 2).reshape(b.size, K, tile * G, H)
    out = _attend(queries, k_cache, v_cache, page_table, tiles, group=G, **options)
    out = jnp.moveaxis(out.reshape(b.size, K, tile, G, H), 2, 1).reshape(-1, N, H)
    at = jnp.arange(T)
    number = num_up_to(jnp.where(counts > 0, first, T), at) - 1  # the tile that token t is in
    return jnp.where((at < query_starts[-1])[:, None, None], out[number * tile + at - first[number]], 0.0)


def _attend(
    queries: Float[Array, "n K R H"],
    k_cache: Pages,
    v_cache: Pages,
    page_table: Int[Array, "B W"],
    tiles: _Tiles,
    *,
    group: int,
    window: int | None = None,
    soft_cap: float | None = None,
    pages: int | None = None,
    interpret: Any = False,
) -> Float[Array, "n K R H"]:
    """Attention of tiles of queries.

    `queries`: rows of each tile and key/value head, scaled, in the dtype of the products.
    """
    (n, K, R, H), p, W = queries.shape, k_cache.shape[2], page_table.shape[1]
    pages = pages or min(pages_of_chunk(k_cache), pl.cdiv(W * p, LANES) * max(1, LANES // p))
    table = jnp.pad(page_table, ((0, 0), (0, -W % pages)))
    work = _list_work(tiles, table.shape[1] // pages, pages * p, window)
    packed = SUBLANES * (4 // queries.dtype.itemsize)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, -R % packed), (0, 0)))
    block = (1, *queries.shape[1:])
    caches, buffers = [k_cache, v_cache], [pltpu.VMEM((2, pages, K, p, H), k_cache.dtype)] * 2
    if isinstance(k_cache, QuantizedPages) and isinstance(v_cache, QuantizedPages):
        factor = FACTOR if k_cache.dtype == jnp.float8_e4m3fn else 1
        scales = (factor * gather_scales(x, table) for x in (k_cache, v_cache))
        caches = [k_cache.values, v_cache.values, *scales]
        buffers += [pltpu.VMEM((2, K, pages * p), jnp.float32)] * 2
    integers = *work, *tiles, table.reshape(-1)
    run = pl.pallas_call(
        partial(_kernel, width=table.shape[1], group=group, window=window, soft_cap=soft_cap),
        out_shape=jax.ShapeDtypeStruct(queries.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(integers),
            grid=(n,),
            in_specs=[
                pl.BlockSpec(block, lambda i, *_: (i, 0, 0, 0)),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in caches),
            ],
            out_specs=pl.BlockSpec(block, lambda i, *_: (i, 0, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, *block[1:3], LANES), jnp.float32),
                pltpu.VMEM(block[1:], jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                *buffers,
            ],
        ),
        interpret=interpret,
        name="paged_attention",
    )
    return run(*integers, queries, *caches)[:, :, :R]


def _seen(tiles: Any, i: Any, window: int | None) -> tuple[Any, Any]:
    """First and last but one position that a query of tile i sees."""
    begin, end = tiles.positions[i], tiles.positions[i] + tiles.counts[i]
    return (0 * begin if window is None else jnp.maximum(begin - (window - 1), 0)), end


def _list_work(tiles: _Tiles, width: int, chunk: int, window: int | None) -> _Work:
    """Chunks with a key that a query of a tile sees."""
    n = tiles.counts.size
    begin, end = _seen(tiles, jnp.arange(n), window)
    first = begin // chunk
    counts = jnp.where(tiles.counts > 0, pl.cdiv(end, chunk) - first, 0)
    ends = jnp.cumsum(counts)
    at = jnp.arange(n * width, dtype=jnp.int32)
    owners = jnp.minimum(num_up_to(ends, at), n - 1)
    chunks = first[owners] + at - (ends - counts)[owners]
    return _Work(*(x.astype(jnp.int32) for x in (owners, chunks, ends)))


def _bits_below(count: Array, tokens: int) -> Array:
    """Words whose bits are set for their first `count` tokens, of `tokens` in a word."""
    return jnp.where(count >= tokens, -1, (1 << 32 // tokens * jnp.clip(count, 0, tokens - 1)) - 1)


def _kernel(*refs: Any, width: int, group: int, window: int | None, soft_cap: float | None) -> None:
    work, tiles, (table, q), rest = _Work(*refs[:3]), _Tiles(*refs[3:6]), refs[6:8], refs[8:]
    num_caches = (len(rest) - 4) // 2
    caches, (out, softmax, sums, arrived), buffers = rest[:num_caches], rest[num_caches:-num_caches], rest[-num_caches:]
    highest, weight_sums = softmax.at[0], softmax.at[1]
    (_, pages, K, p, H), R, dtype = buffers[0].shape, q.shape[2], q.dtype
    chunk, num_tiles = pages * p, work.ends.shape[0]
    dtype_of_pages = buffers[0].dtype
    i = pl.program_id(0)

    def for_each_copy(t: Any, do: Any) -> None:
        """Calls `do` with each copy of chunk t."""
        tile, slot, begin = work.owners[t], lax.rem(t, 2), work.chunks[t] * chunk
        first, end = _seen(tiles, tile, window)
        b = tiles.sequences[tile]

        def of_page(j: Any, _: None) -> None:
            page = table[b * width + work.chunks[t] * pages + j]
            for cache, buffer in zip(caches[:2], buffers[:2], strict=True):
                do(pltpu.make_async_copy(cache.at[page], buffer.at[slot, j], arrived.at[slot]))

        # lax.div: the kernel's compiler would look for a device to choose how `//` compares signs.
        lax.fori_loop(
            lax.div(jnp.maximum(first - begin, 0), p), jnp.minimum(pages, pl.cdiv(end - begin, p)), of_page, None
        )
        for cache, buffer in zip(caches[2:], buffers[2:], strict=True):
            do(pltpu.make_async_copy(cache.at[b, :, pl.ds(begin, chunk)], buffer.at[slot], arrived.at[slot]))

    def widened(x: Array) -> Array:
        return sixteenths(x) if dtype_of_pages == jnp.float8_e4m3fn else x.astype(dtype)

    first, end = _seen(tiles, i, window)
    rows = lax.broadcasted_iota(jnp.int32, (R, chunk), 0)
    last = tiles.positions[i] + lax.div(rows, group)  # rows past the last query are cut off from the result
    ends_before = jnp.where(i == 0, 0, work.ends[jnp.maximum(i - 1, 0)])

    def step(t: Any, _: None) -> None:
        @pl.when(t == 0)
        def _() -> None:
            for_each_copy(t, lambda copy: copy.start())

        @pl.when(t + 1 < work.ends[num_tiles - 1])
        def _() -> None:
            for_each_copy(t + 1, lambda copy: copy.start())

        for_each_copy(t, lambda copy: copy.wait())
        slot, begin = lax.rem(t, 2), work.chunks[t] * chunk

        if dtype_of_pages != jnp.int8:  # integers are never NaN, which a weight of 0 would not remove

            def clear(j: Any, _: None) -> None:
                values = buffers[1].at[slot, j]
                words = pltpu.bitcast(values[...], jnp.int32)
                tokens = p // words.shape[1]
                at = begin + j * p + tokens * lax.broadcasted_iota(jnp.int32, words.shape, 1)
                seen = _bits_below(end - at, tokens) & ~_bits_below(first - at, tokens)
                values[...] = pltpu.bitcast(words & seen, values.dtype)

            # Pages up to the first key that is seen, and from the last one on: the rest is kept whole.
            lax.fori_loop(0, pl.cdiv(jnp.maximum(first - begin, 0), p), clear, None)
            lax.fori_loop(lax.div(end - begin, p), pages, clear, None)

        at = begin + lax.broadcasted_iota(jnp.int32, (R, chunk), 1)
        visible = (at <= last) & (at < end)
        if window is not None:
            visible &= at > last - window
        for h in range(K):
            k, v = (widened(x[slot, :, h].reshape(chunk, H)) for x in buffers[:2])
            scales = [x[slot, pl.ds(h, 1)] for x in buffers[2:]]
            scores = product(q[0, h], k, (1, 1))
            if scales:
                scores *= scales[0]
            scores = jnp.where(visible, soft_capped(scores, soft_cap), MASKED)
            before = highest[h, :, :1]
            now = jnp.maximum(before, scores.max(1, keepdims=True))
            weights, shrink = jnp.where(visible, jnp.exp(scores - now), 0.0), jnp.exp(before - now)
            highest[h] = jnp.broadcast_to(now, highest.shape[1:])
            weight_sums[h] = weight_sums[h] * shrink + weights.sum(1, keepdims=True)
            if scales:
                weights = jnp.where(visible, weights * scales[1], 0.0)
            sums[h] = sums[h] * shrink + product(weights.astype(dtype), v)

    highest[...] = jnp.full(highest.shape, MASKED, jnp.float32)
    weight_sums[...] = jnp.zeros(weight_sums.shape, jnp.float32)
    sums[...] = jnp.zeros(sums.shape, jnp.float32)
    lax.fori_loop(ends_before, work.ends[i], step, None)
    total = weight_sums[:, :, :1]
    out[0] = sums[...] / jnp.where(total == 0, 1.0, total)  # NaN stays


FACTOR = 16
"""Factor from a result of `sixteenths` to the number itself."""

ONES, SIZES = 0x01010101, 0x7F7F7F7F
"""Masks of `sixteenths`: the lowest bit of each byte of a word, and all bits but the sign."""


def sixteenths(x: Float8e4m3fn[Array, "S H"]) -> BFloat16[Array, "S H"]:
    """`x / 16` in bfloat16, exact for subnormal numbers and NaN too; -0 becomes 0. S is a multiple of 4.

    TPUs have no arithmetic for float8_e4m3fn. Registers of a v5e and a v6e are unpacked from float8_e4m3b11fnuz: the
    same bits with an exponent that is larger by 4, but one zero, and NaN in the place of the other. Bits are therefore
    changed four numbers at a time, and scales make up for the factor. A cast by Mosaic changes them after they are
    unpacked, which takes longer.
    """
    words = pltpu.bitcast(x, jnp.int32)
    sizes = words & SIZES
    signs = words & (sizes + SIZES) & ~SIZES  # the sum has the highest bit of a byte where its size is not 0
    nans = ((sizes + ONES) >> 7) & ONES  # sizes of 0x7f, which 1 more makes 0x80
    return pltpu.bitcast(signs | (sizes + nans), jnp.float8_e4m3b11fnuz).astype(jnp.bfloat16)
