"""Native form of `ops.linear` for many rows in bfloat16: blocks of both operands are packed and multiplied in cache."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from verax.ops.cpu import library
from verax.ops.linear import linear

__all__: list[str] = []

MIN_ROWS = 24
"""From here it is faster than the kernel for few rows: 385 and 306 GFLOP/s with a 4096 x 11008 weight, 590 and 326 at
64 rows, where XLA's matmul library has 314. At 512 rows and beyond the two libraries are equal."""

DEPTH_STEP, COLUMN_STEP = 32, 16
"""What the kernel takes whole: inputs of a row, and rows of the weight (`GEMM_DEPTH_STEP` in native/)."""

LEVEL = "avx512_bf16"
"""Where it is faster than XLA's matmul library: with bfloat16 dot products."""


def _accepts(x: Any, weight: Any, bias: Any = None) -> bool:
    if not isinstance(weight, jax.Array | jax.ShapeDtypeStruct) or weight.dtype != jnp.bfloat16:
        return False
    many = math.prod(x.shape[:-1]) >= MIN_ROWS
    return many and takes(weight) and jax.device_count() == 1 and library.level() == LEVEL


def takes(weight: Any) -> bool:
    """Whether the kernel takes a weight of this shape."""
    return weight.shape[0] % COLUMN_STEP == 0 and weight.shape[1] % DEPTH_STEP == 0


@jax.custom_jvp
def _product(
    x: Float[Array, "M D"], weight: Float[Array, "F D"], bias: Float[Array, "F"] | None
) -> Float[Array, "M F"]:
    added = jnp.zeros(0) if bias is None else bias.astype(jnp.float32)
    return library.call("verax_gemm", (x.shape[0], weight.shape[0]), x.astype(jnp.bfloat16), weight, added)


@_product.defjvp
def _product_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return _product(*primals), jax.jvp(linear.__wrapped__, primals, tangents)[1]


@linear.form("native_many", platforms=("cpu",), accepts=_accepts)
def _linear_native_many(
    x: Float[Array, "*B D"], weight: Float[Array, "F D"], bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    return _product(x.reshape(-1, x.shape[-1]), weight, bias).reshape(*x.shape[:-1], weight.shape[0])
