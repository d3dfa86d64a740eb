"""`ops.attention` by JAX's own kernel for TPUs, splash attention (`jax.experimental.pallas.ops.tpu`).

Sequences are padded to whole blocks, and heads come first, both of which XLA copies. The padding has segments of its
own, so that no query sees it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops.attention import attention, flash_kernel

__all__ = ["splash_attention"]

LANES = 128
"""Numbers side by side in a register. Blocks are multiples of them."""

QUERIES, KEYS, KEYS_AT_ONCE = 512, 1024, 512
"""Queries of a tile, keys of a block, and keys that are multiplied at once: estimates, tuned on no device."""

HEAD_SIZES = (64, 128, 256)


def _accepts(q: Any, k: Any, v: Any, *, causal: bool = True, window: int | None = None, **_: Any) -> bool:
    sizes = q.shape[-1] in HEAD_SIZES and min(q.size, k.size) > 0 and q.shape[2] % k.shape[2] == 0
    # Otherwise some queries see nothing, for which the reference has its own answer.
    visible = k.shape[1] >= q.shape[1] or not (causal or window is not None)
    return sizes and k.dtype == v.dtype == jnp.bfloat16 and visible  # it rounds products of float32


@attention.implementation(
    "splash", platforms=("tpu",), single_device=True, accepts=_accepts, traits={"flash"}, experimental=True
)
def _attention_splash(
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
    options = (("causal", causal), ("scale", scale), ("window", window), ("soft_cap", soft_cap))
    return flash_kernel(splash_attention, q, k, v, segments, options)


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
