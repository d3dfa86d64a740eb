"""`ops.sampling.sample` with the search for its thresholds by kernels for NVIDIA GPUs, `sampling_kernel.py`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops._target import AMPERE, has_compute_capability
from verax.ops.sampling import SamplingArrays, sample, sample_by_search

__all__: list[str] = []

MAX_TOKENS = 1 << 24
"""Tokens of a vocabulary that float32 counts exactly."""

MAX_SCORES = 1 << 31
"""Scores of all rows: Triton counts them in 32 bits."""


def _accepts(logits: Any, *_: Any, **__: Any) -> bool:
    sizes = 0 < logits.size < MAX_SCORES and logits.shape[1] <= MAX_TOKENS
    return sizes and logits.dtype == jnp.float32 and has_compute_capability(AMPERE)


@sample.implementation("triton", platforms=("gpu",), single_device=True, accepts=_accepts, experimental=True)
def _sample_triton(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "S L"],
    slots: Int[Array, "B"],
    lengths: Int[Array, "B"],
    params: SamplingArrays,
    mask: Int[Array, "B w"] | None = None,
) -> Int[Array, "B"]:
    from verax.ops.gpu.sampling_kernel import search  # Pallas takes half a second to import

    return sample_by_search(search, logits, tokens, slots, lengths, params, mask)
