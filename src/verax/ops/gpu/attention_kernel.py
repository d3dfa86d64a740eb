"""Attention over whole sequences for NVIDIA GPUs in Pallas, lowered to Triton (FlashAttention-2; arXiv:2307.08691).

    for each tile of queries, query head and batch, all at once:
        for each block of keys from the first to the last one that a query of the tile sees:
            scores;  online softmax;  the sum of values grows

Which blocks those are is found beforehand, in jnp: what the causal mask, the window or the segments empty at either
end is not read. `gpu/paged_kernel.py` says why Triton compiles it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from verax.ops.attention import MASKED, exact_products, soft_capped

__all__ = ["Tile", "flash_attention", "seen_blocks"]


class Tile(NamedTuple):
    """Sizes of the work of a program.

    Attributes:
        queries: queries of a tile.
        keys: keys of a block.
        warps: warps of a program.
    """

    queries: int
    keys: int
    warps: int


MIN_SIZE = 16
"""Columns of a product on tensor cores. With smaller heads, the rest are zeros."""

STAGES = 2
"""Blocks of keys and values that are under way at a time."""


def _tile(width: int, dtype: Any) -> Tile:
    """Tile for heads of `width` numbers: the sums of a tile, `queries * width`, stay in registers.

    Its blocks fit into 99 KiB of shared memory, all that a block has on an L4 or an RTX 4090.
    """
    if dtype == jnp.float32:
        return Tile(32, 16, 8) if width > 128 else Tile(32, 32, 8)
    return Tile(64, 32, 8) if width > 128 else Tile(128, 64, 8)


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segments: Int[Array, "B T"] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`ops.attention`, where each query sees a key; with a `tile`, and `interpret` as `pallas_call` takes it."""
    (B, T, N, H), S = q.shape, k.shape[1]
    tile = tile or _tile(pl.next_power_of_2(H), k.dtype)
    run = pl.pallas_call(
        partial(_kernel, tile=tile, causal=causal, window=window, soft_cap=soft_cap),
        grid=(pl.cdiv(T, tile.queries), N, B),
        out_shape=jax.ShapeDtypeStruct((B, T, N, H), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=STAGES),
        interpret=interpret,
        name="flash_attention",
    )
    queries = (q * (H**-0.5 if scale is None else scale)).astype(k.dtype)
    owners = () if segments is None else (segments.astype(jnp.int32),)
    return run(*seen_blocks(B, T, S, tile, causal, window, *owners), queries, k, v, *owners)


def seen_blocks(
    B: int, T: int, S: int, tile: Tile, causal: bool, window: int | None, segments: Int[Array, "B T"] | None = None
) -> tuple[Int[Array, "B tiles"], Int[Array, "B tiles"]]:
    """First block of keys that a query of each tile may see, and the last but one."""
    firsts = S - T + tile.queries * jnp.arange(pl.cdiv(T, tile.queries))
    lasts = jnp.minimum(firsts + tile.queries, S) - 1
    begins, ends = jnp.zeros_like(firsts), jnp.full_like(lasts, S)
    if causal:
        ends = lasts + 1
    if window is not None:
        begins = jnp.maximum(firsts - window + 1, 0)
        ends = jnp.minimum(ends, lasts + window)
    begins, ends = (jnp.broadcast_to(x, (B, x.size)) for x in (begins // tile.keys, pl.cdiv(ends, tile.keys)))
    if segments is not None:
        (low, high), (lowest, highest) = (_ranges(segments, size) for size in (tile.queries, tile.keys))
        # Segments whose ranges overlap may be the same; packed ones ascend, so that those blocks lie side by side.
        meet = (low[:, :, None] <= highest[:, None]) & (lowest[:, None] <= high[:, :, None])
        begins = jnp.maximum(begins, jnp.argmax(meet, -1))
        ends = jnp.minimum(ends, meet.shape[-1] - jnp.argmax(meet[..., ::-1], -1))
    return begins.astype(jnp.int32), ends.astype(jnp.int32)


def _ranges(segments: Int[Array, "B T"], size: int) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
    """Lowest and highest segment of each `size` tokens."""
    rest = -segments.shape[1] % size
    groups = jnp.pad(segments, ((0, 0), (0, rest)), mode="edge").reshape(segments.shape[0], -1, size)
    return groups.min(-1), groups.max(-1)


def _kernel(
    begins: Any,
    ends: Any,
    q: Any,
    k: Any,
    v: Any,
    *refs: Any,
    tile: Tile,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
) -> None:
    *owners, out = refs
    (_, T, N, H), (_, S, K, _) = q.shape, k.shape
    i, n, b = (pl.program_id(axis) for axis in range(3))
    h = n // (N // K)
    rows = i * tile.queries + jnp.arange(tile.queries)
    size = jnp.arange(max(MIN_SIZE, pl.next_power_of_2(H)))
    # Addresses that are surely there have no mask, since Triton checks each one that has.
    whole = size.size == H
    full_rows, full_keys = T % tile.queries == 0, S % tile.keys == 0

    def load(ref: Any, at: Array, head: Any, is_full: bool, count: int) -> Array:
        mask = None
        if not is_full or not whole:
            mask = (at < count)[:, None] & (size < H)[None]
        return plgpu.load(ref.at[b, at[:, None], head, size[None]], mask=mask, other=None if mask is None else 0.0)

    def owners_of(at: Array, is_full: bool) -> Array:
        mask = None if is_full else at < T
        return plgpu.load(owners[0].at[b, at], mask=mask, other=None if is_full else 0)

    queries = load(q, rows, n, full_rows, T)
    own = owners_of(rows, full_rows)[:, None] if owners else None

    def body(block: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, sums, acc = carry
        at = block * tile.keys + jnp.arange(tile.keys)
        keys = load(k, at, h, full_keys, S)
        scores = plgpu.dot(queries, keys, trans_b=True, precision=exact_products(keys))
        scores = soft_capped(scores, soft_cap)
        behind = rows[:, None] + (S - T) - at[None]
        hidden = [] if full_keys else [(at >= S)[None]]
        if causal:
            hidden.append(behind < 0)
        if window is not None:
            hidden.append(abs(behind) >= window)
        if owners:
            hidden.append(own != owners_of(at, full_keys)[None])
        for mask in hidden:
            scores = jnp.where(mask, MASKED, scores)
        now = jnp.maximum(highest, scores.max(1))
        weights, shrink = jnp.exp(scores - now[:, None]), jnp.exp(highest - now)
        values = load(v, at, h, full_keys, S)
        product = plgpu.dot(weights.astype(values.dtype), values, precision=exact_products(values))
        return now, sums * shrink + weights.sum(1), acc * shrink[:, None] + product

    # A block without a key that a query sees leaves it at `MASKED`, with weights of 1: the first key that it does see
    # shrinks them to 0.
    start = (
        jnp.full((tile.queries,), MASKED, jnp.float32),
        jnp.zeros((tile.queries,), jnp.float32),
        jnp.zeros((tile.queries, size.size), jnp.float32),
    )
    _, sums, acc = lax.fori_loop(begins[b, i], ends[b, i], body, start)
    mask = (rows < T)[:, None] & (size < H)[None]
    plgpu.store(out.at[b, rows[:, None], n, size[None]], acc / sums[:, None], mask=mask)
