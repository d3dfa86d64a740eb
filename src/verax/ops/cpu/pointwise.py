"""C++ kernels of the norms and of GELU: passes over a row that is in the cache, where XLA runs several programs, by
vectors as wide as the processor has, where XLA takes half of AVX-512's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.ops.cpu import library
from verax.ops.pointwise import gelu, layer_norm, rms_norm

__all__: list[str] = []

_FLOATS = (jnp.float32, jnp.bfloat16)


def _accepts(x: Any, weight: Any, eps: float) -> bool:
    return x.dtype in _FLOATS and weight.dtype in _FLOATS


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _normalize(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    return library.call("verax_rms_norm", x.shape, x.astype(jnp.float32), weight, eps=np.float32(eps))


@_normalize.defjvp
def _normalize_jvp(eps: float, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return jax.jvp(lambda x, weight: rms_norm.reference(x, weight, eps), primals, tangents)


@rms_norm.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _rms_norm_native(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    return _normalize(x, weight, eps)


def _accepts_layer(x: Any, weight: Any, bias: Any, eps: float, residual: Any = None) -> bool:
    return x.dtype in _FLOATS and weight.dtype in _FLOATS and (residual is None or residual.dtype in _FLOATS)


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def _normalize_layer(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D"],
    bias: Float[Array, "D"],
    residual: Float[Array, "*B D"] | None,
    eps: float,
) -> Float[Array, "*B D"]:
    added = jnp.zeros(0) if residual is None else residual.astype(jnp.float32)
    arrays = x.astype(jnp.float32), added, weight, bias.astype(weight.dtype)
    return library.call("verax_layer_norm", x.shape, *arrays, eps=np.float32(eps))


@_normalize_layer.defjvp
def _normalize_layer_jvp(eps: float, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return jax.jvp(
        lambda x, weight, bias, residual: layer_norm.reference(x, weight, bias, eps, residual), primals, tangents
    )


@layer_norm.implementation("native", **library.REQUIREMENTS, accepts=_accepts_layer)
def _layer_norm_native(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D"],
    bias: Float[Array, "D"],
    eps: float,
    residual: Float[Array, "*B D"] | None = None,
) -> Float[Array, "*B D"]:
    return _normalize_layer(x, weight, bias, residual, eps)


def _accepts_gelu(x: Any) -> bool:
    return x.dtype == jnp.float32


@jax.custom_jvp
def _gelu(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    return library.call("verax_gelu", x.shape, x)


@_gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _gelu(*primals), jax.jvp(gelu.reference, primals, tangents)[1]


@gelu.implementation("native", **library.REQUIREMENTS, accepts=_accepts_gelu)
def _gelu_native(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    return _gelu(x)
