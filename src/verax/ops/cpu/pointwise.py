"""C++ kernels of the norms, by themselves or with a rotation, and of GELU: passes over a row in the cache, where XLA
runs several programs, by vectors as wide as the processor has, where XLA takes half of AVX-512's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax.ops._dispatch import differentiated_as, replaced_by
from verax.ops.cpu import library
from verax.ops.cpu.attention import FLOATS
from verax.ops.pointwise import gelu, layer_norm, rms_norm
from verax.ops.rope import norm_rotary


def _accepts(eps: Any, *arrays: Any) -> bool:
    # The kernels take eps as an attribute: a number that is known while tracing.
    return not isinstance(eps, jax.Array) and all(array is None or array.dtype in FLOATS for array in arrays)


def _accepts_rms(x: Any, weight: Any, eps: float, *, silu: bool = False, dtype: DTypeLike = jnp.float32) -> bool:
    return _accepts(eps, x, weight) and jnp.dtype(dtype) in FLOATS


@rms_norm.implementation("native", **library.REQUIREMENTS, accepts=_accepts_rms)
def _rms_norm_native(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    silu: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*B D"]:
    def kernel(x: Array, weight: Array) -> Array:
        options: dict[str, Any] = {"eps": np.float32(eps), "silu": silu, "dtype": dtype}
        return library.call("verax_rms_norm", x.shape, x, weight, **options)

    return replaced_by(partial(rms_norm.reference, eps=eps, silu=silu, dtype=dtype), kernel, x, weight)


def _accepts_rotary(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: float) -> bool:
    same = cos.shape == sin.shape and cos.shape[:-1] == q.shape[:-2] == k.shape[:-2]
    return same and _accepts(eps, q, q_weight, k, k_weight) and cos.dtype == sin.dtype == jnp.float32


@norm_rotary.implementation("native", **library.REQUIREMENTS, accepts=_accepts_rotary)
def _norm_rotary_native(
    q: Float[Array, "*B N H"],
    k: Float[Array, "*B K H"],
    q_weight: Float[Array, "H"],
    k_weight: Float[Array, "H"],
    cos: Float[Array, "*B h"],
    sin: Float[Array, "*B h"],
    eps: float,
) -> tuple[Float[Array, "*B N H"], Float[Array, "*B K H"]]:
    def kernel(q: Array, k: Array, q_weight: Array, k_weight: Array, cos: Array, sin: Array) -> tuple[Array, ...]:
        heads = [x.astype(jnp.float32).reshape(-1, *x.shape[-2:]) for x in (q, k)]
        tables = [table.reshape(-1, table.shape[-1]) for table in (cos, sin)]
        outs = library.call_many("verax_norm_rotary", heads, *heads, q_weight, k_weight, *tables, eps=np.float32(eps))
        return tuple(out.reshape(x.shape) for out, x in zip(outs, (q, k), strict=True))

    return replaced_by(partial(norm_rotary.reference, eps=eps), kernel, q, k, q_weight, k_weight, cos, sin)


def _accepts_layer(x: Any, weight: Any, bias: Any, eps: float, residual: Any = None) -> bool:
    return _accepts(eps, x, weight, residual)


@layer_norm.implementation("native", **library.REQUIREMENTS, accepts=_accepts_layer)
def _layer_norm_native(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D"],
    bias: Float[Array, "D"],
    eps: float,
    residual: Float[Array, "*B D"] | None = None,
) -> Float[Array, "*B D"]:
    def kernel(x: Array, weight: Array, bias: Array, residual: Array | None) -> Array:
        added = library.optional(residual)
        # The kernel takes both of one dtype: a float32 bias must not be rounded to the weight's bfloat16.
        dtype = weight.dtype if bias.dtype == weight.dtype else jnp.float32
        arrays = x.astype(jnp.float32), added, weight.astype(dtype), bias.astype(dtype)
        return library.call("verax_layer_norm", x.shape, *arrays, eps=np.float32(eps))

    def reference(x: Array, weight: Array, bias: Array, residual: Array | None) -> Array:
        return layer_norm.reference(x, weight, bias, eps, residual)

    return replaced_by(reference, kernel, x, weight, bias, residual)


def _accepts_gelu(x: Any) -> bool:
    return x.dtype == jnp.float32


@gelu.implementation("native", **library.REQUIREMENTS, accepts=_accepts_gelu)
def _gelu_native(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    return differentiated_as(gelu.reference, lambda x: library.call("verax_gelu", x.shape, x), x)
