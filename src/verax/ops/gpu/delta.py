"""The delta rule's scan over chunks by a kernel for NVIDIA GPUs, `delta_kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops._target import AMPERE, has_compute_capability
from verax.ops.delta._scan import Chunk, delta_chunk_scan, scan_kernel

__all__: list[str] = []

KEY_SIZES = (32, 64, 128, 256)
"""Sizes of keys: tiles of Triton are powers of two."""

COLUMNS = 16
"""The size of values is a multiple of it: the columns of the state in a program."""

CHUNK_SIZES = (16, 32, 64)

MAX_KEYS = 64 * 128
"""Numbers of a chunk's keys, for which there is shared memory."""


def _accepts(chunks: Chunk, states: Any, owner: Any, **_: Any) -> bool:
    C, K, V = chunks.found.shape[-2], *states.shape[-2:]
    sizes = K in KEY_SIZES and V % COLUMNS == 0 and C in CHUNK_SIZES and C * K <= MAX_KEYS
    float32 = all(x.dtype == jnp.float32 for x in (*chunks, states))
    return sizes and float32 and chunks.value.size > 0 and states.size > 0 and has_compute_capability(AMPERE)


@delta_chunk_scan.implementation("triton", platforms=("gpu",), single_device=True, accepts=_accepts, experimental=True)
def _delta_chunk_scan_triton(
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    *,
    keep_states: bool = False,
) -> tuple[Float[Array, "n m R C V"], Float[Array, "N m R K V"], Float[Array, "n m R K V"] | None]:
    from verax.ops.gpu.delta_kernel import chunk_scan  # Pallas takes half a second to import

    return scan_kernel(partial(chunk_scan, columns=COLUMNS), chunks, states, owner, keep_states)
