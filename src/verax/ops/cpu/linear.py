"""Native forms of `ops.linear`: few rows of x, at the speed at which the weight comes from memory."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.ops.cpu import library
from verax.ops.linear import Weight, linear
from verax.ops.quantized import QuantizedWeight

__all__: list[str] = []

MAX_ROWS = 32
"""Up to here XLA's matmul library is slower: 1.2 times at 32 rows of a 4096 x 11008 weight (`verax bench ops`)."""

MAX_ROWS_QUANTIZED = 128
"""The same with a quantised weight, which XLA has to write out as bfloat16 first: 4 to 8 times slower at 32 rows."""


def _accepts(x: Any, weight: Any, bias: Any = None) -> bool:
    if isinstance(weight, QuantizedWeight):
        few = math.prod(x.shape[:-1]) <= MAX_ROWS_QUANTIZED
    else:
        few = math.prod(x.shape[:-1]) <= MAX_ROWS and weight.dtype in (jnp.float32, jnp.bfloat16)
    # One device: a mesh divides plain products over its devices, but not a kernel that it knows nothing about.
    return few and jax.device_count() == 1 and library.available()


@jax.custom_jvp
def _product(x: Float[Array, "M D"], weight: Weight) -> Float[Array, "M F"]:
    x, shape = x.astype(jnp.float32), (x.shape[0], weight.shape[0])
    if not isinstance(weight, QuantizedWeight):
        return library.call("verax_linear", shape, x, weight)
    group = np.int64(weight.group_size or 0)
    return library.call("verax_linear_quantized", shape, x, weight.values, weight.scales, group=group)


@_product.defjvp
def _product_jvp(primals: tuple[Array, Any], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    _, tangent = jax.jvp(linear.__wrapped__, primals, tangents)
    return _product(*primals), tangent


@linear.form("native", platforms=("cpu",), accepts=_accepts)
def _linear_native(
    x: Float[Array, "*B D"], weight: Weight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    y = _product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.astype(jnp.float32)
