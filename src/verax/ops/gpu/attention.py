"""`ops.attention` by cuDNN, which writes no scores out (FlashAttention-2; Dao, 2023, arXiv:2307.08691).

JAX calls cuDNN only by name. No mask is passed, because cuDNN would read it as a bias for each score: calls with
windows, segments or soft caps are left to XLA.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops._target import AMPERE, has_compute_capability, target
from verax.ops.attention import attention, chunked_attention

__all__: list[str] = []

MAX_HEAD_DIM = 128
"""Largest head size on every GPU that cuDNN's kernel runs on; Hopper and later take 256."""

HEAD_DIM_STEP = 8


def _accepts(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    segments: Any = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> bool:
    H = q.shape[-1]
    dtypes = k.dtype in (jnp.bfloat16, jnp.float16) and v.dtype == k.dtype
    sizes = H <= MAX_HEAD_DIM and H % HEAD_DIM_STEP == 0 and min(q.size, k.size) > 0
    # cuDNN counts causal keys from the first one, ops.attention from the last: the same for as many queries as keys.
    visible = segments is None and window is None and soft_cap is None and (not causal or q.shape[1] == k.shape[1])
    return dtypes and sizes and visible and has_compute_capability(AMPERE)


@attention.implementation("cudnn", platforms=("gpu",), accepts=_accepts, traits={"flash"})
def _attention_cudnn(
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
    if not target().attached:
        # JAX traces cuDNN's call only on a machine that has cuDNN. These products have the same shapes and results.
        return jax.jit(partial(chunked_attention, causal=causal, scale=scale))(q, k, v)
    out = jax.nn.dot_product_attention(q.astype(k.dtype), k, v, scale=scale, is_causal=causal, implementation="cudnn")
    return out.astype(jnp.float32)
