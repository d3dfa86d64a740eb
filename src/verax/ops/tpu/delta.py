"""The delta rules by Pallas kernels for TPUs: their scan over chunks and its gradient, `delta_kernel.py`, and their
decode step, `delta_step_kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import differentiated_as
from verax.ops.delta import DeltaInputs, delta_slot_recurrence
from verax.ops.delta._chunk import is_step
from verax.ops.delta._inputs import StateSlots
from verax.ops.delta._recurrence import step_by_kernel
from verax.ops.delta._scan import Chunk, delta_chunk_scan, delta_chunk_scan_backward

__all__: list[str] = []

LANES, SUBLANES = 128, 8
"""Numbers side by side in a register, and rows of it. Sizes of keys and values are multiples of the first, tokens of a
chunk of the second."""

MAX_STATE, MAX_CHUNK = 256 * 256, 64
"""Numbers of a state, and tokens of a chunk, for which there is vector memory."""

MAX_STEP_STATES = 48 * 128 * 128
"""Numbers of a sequence's states in a decode step, for which there is: it holds four times as many, or 12 MiB."""


def _accepts(chunks: Chunk, states: Any, *_: Any, **options: Any) -> bool:
    C, K, V = chunks.found.shape[-2], *states.shape[-2:]
    sizes = K % LANES == 0 and V % LANES == 0 and C % SUBLANES == 0 and K * V <= MAX_STATE and C <= MAX_CHUNK
    float32 = all(x.dtype == jnp.float32 for x in (*chunks, states))
    return sizes and float32 and chunks.value.size > 0 and states.size > 0


@delta_chunk_scan.implementation("pallas", platforms=("tpu",), single_device=True, accepts=_accepts, experimental=True)
def _delta_chunk_scan_pallas(
    chunks: Chunk,
    states: Float[Array, "N m R K V"],
    owner: Int[Array, "n"],
    *,
    keep_states: bool = False,
) -> tuple[Float[Array, "n m R C V"], Float[Array, "N m R K V"], Float[Array, "n m R K V"] | None]:
    from verax.ops.tpu.delta_kernel import chunk_scan  # Pallas takes half a second to import

    options = {"keep_states": keep_states}
    reference = partial(delta_chunk_scan.reference, **options)
    return differentiated_as(reference, partial(chunk_scan, **options), chunks, states, owner)


@delta_chunk_scan_backward.implementation(
    "pallas", platforms=("tpu",), single_device=True, accepts=_accepts, experimental=True
)
def _delta_chunk_scan_backward_pallas(
    chunks: Chunk, d_final: Float[Array, "N m R K V"], owner: Int[Array, "n"], d_out: Float[Array, "n m R C V"]
) -> tuple[Float[Array, "N m R K V"], Float[Array, "n m R K V"]]:
    from verax.ops.tpu.delta_kernel import chunk_scan_backward

    reference = delta_chunk_scan_backward.reference
    return differentiated_as(reference, chunk_scan_backward, chunks, d_final, owner, d_out)


def _accepts_step(
    x: DeltaInputs, states: Any, slots: StateSlots, cu_seqlens: Any = None, *, scale: Any = 1.0, **_: Any
) -> bool:
    _, HV, K, V = states.shape
    dtypes = all(a.dtype in (jnp.float32, jnp.bfloat16) for a in x) and states.dtype == jnp.float32
    sizes = K % LANES == 0 and V % LANES == 0 and HV * K * V <= MAX_STEP_STATES and x.v.size > 0 and states.size > 0
    return dtypes and sizes and is_step(x, states, cu_seqlens) and not isinstance(scale, jax.Array)


@delta_slot_recurrence.implementation(
    "pallas", platforms=("tpu",), single_device=True, accepts=_accepts_step, experimental=True
)
def _delta_step_pallas(
    x: DeltaInputs, states: Float[Array, "S HV K V"], slots: StateSlots, cu_seqlens: None = None, **options: Any
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    from verax.ops.tpu.delta_step_kernel import delta_step

    return step_by_kernel(delta_step, x, states, slots, **options)
