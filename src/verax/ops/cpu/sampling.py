"""C++ kernel of `ops.sampling.sample`: a row in the caches of one core, where XLA goes over it in memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax.ops.cpu import library
from verax.ops.sampling import SamplingArrays, sample

__all__: list[str] = []


def _accepts(logits: Any, params: Any, u: Any) -> bool:
    return logits.shape[-1] > 0


@sample.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _sample_native(logits: Float[Array, "B V"], params: SamplingArrays, u: Float[Array, "B"]) -> Int[Array, "B"]:
    floats = (x.astype(jnp.float32) for x in (params.top_p, params.min_p, u))
    return library.call(
        "verax_sample",
        logits.shape[:1],
        logits.astype(jnp.float32),
        params.temperature.astype(jnp.float32),
        params.top_k.astype(jnp.int32),
        *floats,
        dtype="int32",
    )
