"""The delta rules by kernels for NVIDIA GPUs: their scan over chunks and its gradient, `delta_kernel.py`, and
their decode step, `delta_step_kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import differentiated_as
from verax.ops._target import AMPERE, has_compute_capability
from verax.ops.delta import DeltaInputs, delta_slot_recurrence
from verax.ops.delta._chunk import is_step
from verax.ops.delta._inputs import StateSlots
from verax.ops.delta._recurrence import step_by_kernel
from verax.ops.delta._scan import Chunk, delta_chunk_scan, delta_chunk_scan_backward

__all__: list[str] = []

KEY_SIZES = (32, 64, 128, 256)
"""Sizes of keys: tiles of Triton are powers of two."""

COLUMNS = 16
"""The size of values is a multiple of it: the columns of the state in a program."""

CHUNK_SIZES = (16, 32, 64)

MAX_KEYS = 64 * 128
"""Numbers of a chunk's keys, for which there is shared memory."""

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)

MAX_STEP_KEYS = 256
"""Largest size of keys in a decode step, for which a program has registers."""

MAX_NUMBERS = 1 << 31
"""Numbers of all states in a decode step: Triton counts them in 32 bits."""


def _accepts(chunks: Chunk, states: Any, *_: Any, **options: Any) -> bool:
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

    options = {"keep_states": keep_states}
    reference = partial(delta_chunk_scan.reference, **options)
    return differentiated_as(reference, partial(chunk_scan, columns=COLUMNS, **options), chunks, states, owner)


@delta_chunk_scan_backward.implementation(
    "triton", platforms=("gpu",), single_device=True, accepts=_accepts, experimental=True
)
def _delta_chunk_scan_backward_triton(
    chunks: Chunk, d_final: Float[Array, "N m R K V"], owner: Int[Array, "n"], d_out: Float[Array, "n m R C V"]
) -> tuple[Float[Array, "N m R K V"], Float[Array, "n m R K V"]]:
    from verax.ops.gpu.delta_kernel import chunk_scan_backward

    kernel = partial(chunk_scan_backward, columns=COLUMNS)
    return differentiated_as(delta_chunk_scan_backward.reference, kernel, chunks, d_final, owner, d_out)


def _accepts_step(
    x: DeltaInputs, states: Any, slots: StateSlots, cu_seqlens: Any = None, *, scale: Any = 1.0, **_: Any
) -> bool:
    dtypes = all(a.dtype in FLOATS for a in x) and states.dtype == jnp.float32
    sizes = is_step(x, states, cu_seqlens) and 0 < x.read.shape[3] <= MAX_STEP_KEYS and 0 < states.size < MAX_NUMBERS
    constant = not isinstance(scale, jax.Array)
    return dtypes and sizes and x.v.size > 0 and constant and has_compute_capability(AMPERE)


@delta_slot_recurrence.implementation(
    "triton", platforms=("gpu",), single_device=True, accepts=_accepts_step, experimental=True
)
def _delta_step_triton(
    x: DeltaInputs, states: Float[Array, "S HV K V"], slots: StateSlots, cu_seqlens: None = None, **options: Any
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    from verax.ops.gpu.delta_step_kernel import delta_step

    return step_by_kernel(delta_step, x, states, slots, **options)
