"""Attention over whole sequences for TPUs in Pallas: scores stay in vector memory (FlashAttention, arXiv:2205.14135).

    for each sequence, head and tile of queries:
        for each block of keys that one of the tile's queries sees:
            online softmax of the tile's queries over the block
        the tile's result

Heads lie side by side in memory, so that a tile of one head is a part of the columns and nothing is transposed. Small
heads share a tile: two of 64 fill the 128 lanes of a register, and each is multiplied with the lanes of the others
cleared, which takes the matrix unit no longer than a head alone. Neither queries nor keys are padded to whole tiles:
numbers past the end of an array may be anything, their scores are masked, and their values cleared. Blocks whose keys
are all seen by all queries are multiplied without a mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from verax.ops.attention import MASKED, heads_to_join, soft_capped
from verax.ops.tpu.products import product

__all__ = ["flash_attention"]

LANES = 128
"""Numbers side by side in a register."""

QUERIES, KEYS = 512, 1024
"""Queries of a tile, and keys of a block: of a v5e's cycles, its products need 2,048, its schedule has 2,362,
and 2,505 with a mask. Smaller blocks take up to 1.6 times as many for as much work, larger ones 0.95 times, but not
with heads of 256 in float32."""


class _Mask(NamedTuple):
    """Keys that a query sees by its position.

    Attributes:
        offset: position of the first query among the keys.
        num_queries, num_keys: lengths.
        causal, window: see `ops.attention`.
    """

    offset: int
    num_queries: int
    num_keys: int
    causal: bool
    window: int | None

    def seen(self, begin: Any, count: int) -> tuple[Any, Any]:
        """First and last key that one of `count` queries from `begin` on sees."""
        first = 0 if self.window is None else jnp.maximum(begin + self.offset - (self.window - 1), 0)
        last = jnp.minimum(begin + count, self.num_queries) - 1 + self.offset
        if not self.causal:
            last = self.num_keys - 1 if self.window is None else last + self.window - 1
        return first, jnp.minimum(last, self.num_keys - 1)

    def sees_all(self, begin: Any, count: int, first: Any, last: Any) -> Any:
        """True if each of `count` queries from `begin` on sees all keys from `first` to `last`."""
        low, high = begin + self.offset, begin + count - 1 + self.offset
        sees = last < self.num_keys
        if self.causal:
            sees &= last <= low
        if self.window is not None:
            sees &= (high - first < self.window) & (last - low < self.window)
        return sees

    def visible(self, queries: Array, keys: Array) -> Array:
        """True for keys that a query sees."""
        behind = queries + self.offset - keys
        visible = keys < self.num_keys
        if self.causal:
            visible &= behind >= 0
        if self.window is not None:
            visible &= abs(behind) < self.window
        return visible


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
    queries: int = QUERIES,
    keys: int = KEYS,
    interpret: Any = False,
) -> Float[Array, "B T N H"]:
    """`ops.attention`.

    Args:
        q, k, v, segments: see there.
        causal, scale, window, soft_cap: likewise.
        queries: queries of a tile.
        keys: keys of a block.
        interpret: as `pallas_call` takes it.
    """
    B, T, N, H = q.shape
    q = (q * (H**-0.5 if scale is None else scale)).astype(k.dtype)
    together = heads_to_join(H)
    q, k, v = _share_tiles(q, k, v, together)
    S, K, G, W = k.shape[1], k.shape[2] // together, q.shape[2] // k.shape[2], together * H
    rows, columns = (min(most, pl.cdiv(size, LANES) * LANES) for most, size in ((queries, T), (keys, S)))
    mask = _Mask(S - T, T, S, causal, window)
    width = pl.cdiv(S, columns)
    if window is not None:  # the keys that a tile sees may begin anywhere in a block
        width = min(width, pl.cdiv(rows + (window - 1) * (1 if causal else 2) - 1, columns) + 1)

    def block(i: Any, j: Any) -> Any:
        first, last = mask.seen(i * rows, rows)
        return jnp.minimum(lax.div(first, columns) + j, lax.div(last, columns))

    of_queries = pl.BlockSpec((1, rows, W), lambda b, n, i, j: (b, i, n))
    of_keys = pl.BlockSpec((1, columns, W), lambda b, n, i, j: (b, block(i, j), lax.div(n, G)))
    in_specs, owners = [of_queries, of_keys, of_keys], []
    if segments is not None:
        owners = [segments.astype(jnp.int32)[:, :, None], segments.astype(jnp.int32)[:, None]]
        in_specs += [
            pl.BlockSpec((1, rows, 1), lambda b, n, i, j: (b, i, 0)),
            pl.BlockSpec((1, 1, columns), lambda b, n, i, j: (b, 0, block(i, j))),
        ]
    run = pl.pallas_call(
        partial(_kernel, mask=mask, together=together, soft_cap=soft_cap),
        out_shape=jax.ShapeDtypeStruct((B, T, K * G * W), jnp.float32),
        grid=(B, K * G, pl.cdiv(T, rows), width),
        in_specs=in_specs,
        out_specs=of_queries,
        scratch_shapes=[*[pltpu.VMEM((together, rows, LANES), jnp.float32)] * 2, pltpu.VMEM((rows, W), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="flash_attention",
    )
    out = run(q.reshape(B, T, K * G * W), k.reshape(B, S, K * W), v.reshape(B, S, K * W), *owners)
    return jnp.swapaxes(out.reshape(B, T, K, G, together, H), 3, 4).reshape(B, T, -1, H)[:, :, :N]


def _share_tiles(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], together: int
) -> tuple[Float[Array, "B T M H"], Float[Array, "B S L H"], Float[Array, "B S L H"]]:
    """Heads in the order of tiles: queries of `together` key/value heads, one of each. Heads of zeros fill the last.

    Args:
        q, k, v: queries, keys and values.
        together: heads of a tile.
    """
    B, T, N, H = q.shape
    K, G = k.shape[2], N // k.shape[2]
    missing = -K % together
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, n), (0, 0))) for x, n in ((q, missing * G), (k, missing), (v, missing)))
    return jnp.swapaxes(q.reshape(B, T, -1, together, G, H), 3, 4).reshape(q.shape), k, v


def _kernel(q: Any, k: Any, v: Any, *refs: Any, mask: _Mask, together: int, soft_cap: float | None) -> None:
    *owners, out, highest, weight_sums, sums = refs
    rows, columns = q.shape[1], k.shape[1]
    i, j = pl.program_id(2), pl.program_id(3)
    first, last = mask.seen(i * rows, rows)
    begin = (lax.div(first, columns) + j) * columns

    @pl.when(j == 0)
    def _() -> None:
        highest[...] = jnp.full(highest.shape, MASKED, jnp.float32)
        weight_sums[...] = jnp.zeros(weight_sums.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def own(x: Array, h: int) -> Any:
        """True for numbers that are head h's."""
        return lax.div(lax.broadcasted_iota(jnp.int32, x.shape, 1), x.shape[1] // together) == h

    def of_head(x: Array, h: int) -> Array:
        """Numbers of head h, and zeros in the place of the others."""
        return x if together == 1 else jnp.where(own(x, h), x.astype(jnp.float32), 0.0).astype(x.dtype)

    def step(masked: bool) -> None:
        values, visible = v[0], None
        if masked:
            at = begin + lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
            visible = mask.visible(i * rows + lax.broadcasted_iota(jnp.int32, (rows, columns), 0), at)
            if owners:
                of_rows, of_columns = owners
                visible &= of_rows[0] == of_columns[0]
            if mask.num_keys % columns:
                exists = begin + lax.broadcasted_iota(jnp.int32, values.shape, 0) < mask.num_keys
                values = jnp.where(exists, values.astype(jnp.float32), 0.0).astype(values.dtype)
        for h in range(together):
            scores = soft_capped(product(of_head(q[0], h), of_head(k[0], h), (1, 1)), soft_cap)
            if visible is not None:
                scores = jnp.where(visible, scores, MASKED)
            before = highest[h, :, :1]
            now = jnp.maximum(before, scores.max(1, keepdims=True))
            # Keys masked before the first visible one have a weight of 1 here, which its maximum then shrinks to 0.
            weights, shrink = jnp.exp(scores - now), jnp.exp(before - now)
            highest[h] = jnp.broadcast_to(now, highest.shape[1:])
            weight_sums[h] = weight_sums[h] * shrink + weights.sum(1, keepdims=True)
            updated = sums[...] * shrink + product(weights.astype(values.dtype), values)
            sums[...] = updated if together == 1 else jnp.where(own(updated, h), updated, sums[...])

    is_seen = begin <= last
    needs_no_mask = (not owners) & mask.sees_all(i * rows, rows, begin, begin + columns - 1)
    pl.when(is_seen & needs_no_mask)(partial(step, False))
    pl.when(is_seen & ~needs_no_mask)(partial(step, True))

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        result = sums[...]
        for h in range(together):
            divided = sums[...] / weight_sums[h, :, :1]
            result = divided if together == 1 else jnp.where(own(result, h), divided, result)
        out[0] = result
