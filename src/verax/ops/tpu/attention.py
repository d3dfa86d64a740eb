"""`ops.attention` by a Pallas kernel for TPUs, `attention_kernel.py`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops.attention import attention, flash_kernel, heads_to_join

__all__: list[str] = []

LANES = 128
"""Numbers side by side in a register. A head is a multiple of them, or shares them with others."""

MAX_HEAD_DIM = 256
"""Largest head size, for whose blocks there is vector memory."""


def _accepts(q: Any, k: Any, v: Any, *, causal: bool = True, window: int | None = None, **_: Any) -> bool:
    H = q.shape[-1]
    fills = heads_to_join(H) > 1 or (H % LANES == 0 and H <= MAX_HEAD_DIM)
    sizes = fills and min(q.size, k.size) > 0 and q.shape[2] % k.shape[2] == 0
    dtypes = k.dtype in (jnp.float32, jnp.bfloat16) and v.dtype == k.dtype
    # Otherwise some queries see nothing, for which the reference has its own answer.
    visible = k.shape[1] >= q.shape[1] or not (causal or window is not None)
    return sizes and dtypes and visible


@attention.implementation(
    "pallas", platforms=("tpu",), single_device=True, accepts=_accepts, traits={"flash"}, experimental=True
)
def _attention_pallas(
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
    from verax.ops.tpu.attention_kernel import flash_attention  # Pallas takes half a second to import

    options = (("causal", causal), ("scale", scale), ("window", window), ("soft_cap", soft_cap))
    return flash_kernel(flash_attention, q, k, v, segments, options)
