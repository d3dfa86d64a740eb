"""C++ kernels of `ops.sampling`: a row in the caches of one core, where XLA goes over it in memory.

XLA's programs of the same take longer to compile than the layers of a model do: they are many, and each is used once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from verax.ops.cpu import library
from verax.ops.sampling import SamplingArrays, sample, token_logprobs


def _accepts(logits: Any, *args: Any, **kwargs: Any) -> bool:
    return logits.shape[-1] > 0


@sample.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _sample_native(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "S L"],
    slots: Int[Array, "B"],
    lengths: Int[Array, "B"],
    params: SamplingArrays,
    mask: Int[Array, "B w"] | None = None,
) -> Int[Array, "B"]:
    if mask is None:
        mask = jnp.zeros((logits.shape[0], 0), jnp.int32)
    return library.call(
        "verax_sample",
        logits.shape[:1],
        logits.astype(jnp.float32),
        tokens.astype(jnp.int32),
        slots.astype(jnp.int32),
        lengths.astype(jnp.int32),
        *params,
        mask,
        dtype="int32",
    )


@token_logprobs.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _token_logprobs_native(
    logits: Float[Array, "B V"], chosen: Int[Array, "B"], wanted: Bool[Array, "B"], *, num_top: int
) -> tuple[Float[Array, "B n"], Int[Array, "B n"], Int[Array, "B"]]:
    rows = logits.shape[:1]
    results = [
        jax.ShapeDtypeStruct((*rows, 1 + num_top), jnp.float32),
        jax.ShapeDtypeStruct((*rows, 1 + num_top), jnp.int32),
        jax.ShapeDtypeStruct(rows, jnp.int32),
    ]
    arrays = logits.astype(jnp.float32), chosen.astype(jnp.int32), wanted
    values, ids, ranks = library.call_many("verax_token_logprobs", results, *arrays)
    return values, ids, ranks
