"""C++ kernel of `ops.rms_norm`: one pass over a row that is in the cache, where XLA runs several programs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.ops.cpu import library
from verax.ops.norm import rms_norm

__all__: list[str] = []


def _accepts(x: Any, weight: Any, eps: float) -> bool:
    floats = (jnp.float32, jnp.bfloat16)
    return x.dtype in floats and weight.dtype in floats


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _normalize(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    return library.call("verax_rms_norm", x.shape, x.astype(jnp.float32), weight, eps=np.float32(eps))


@_normalize.defjvp
def _normalize_jvp(eps: float, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return jax.jvp(lambda x, weight: rms_norm.reference(x, weight, eps), primals, tangents)


@rms_norm.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _rms_norm_native(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    return _normalize(x, weight, eps)
