"""Native implementations of `ops.grouped_linear`: they read the matrices of those groups that have rows, no others."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from verax.ops.cpu import gemm, library
from verax.ops.grouped import Stack, grouped_linear
from verax.ops.quantized import QuantizedWeight

__all__: list[str] = []


def _accepts(x: Any, weights: Any, groups: Any) -> bool:
    if isinstance(weights, QuantizedWeight):
        return weights.zeros is None and weights.order is None
    return weights.dtype in (jnp.float32, jnp.bfloat16)


def _accepts_many(x: Any, weights: Any, groups: Any) -> bool:
    if isinstance(weights, QuantizedWeight) or not _accepts(x, weights, groups):
        return False
    # By the mean of the groups, which the shapes give: how many rows a group has must not decide about their rounding.
    rows = math.prod(jnp.broadcast_shapes(x.shape[:-1], groups.shape)) / weights.shape[0]
    sizes = jax.ShapeDtypeStruct(weights.shape[1:], weights.dtype)
    faster = gemm.faster_rows(str(weights.dtype))
    return bool(faster) and rows >= faster.start and gemm.takes(sizes)


@jax.custom_jvp
def _products(x: Float[Array, "M D"], weights: Any, groups: Int[Array, "R"]) -> Float[Array, "R F"]:
    shape = groups.shape[0], weights.shape[1]
    x, groups = x.astype(jnp.float32), groups.astype(jnp.int32)
    if isinstance(weights, QuantizedWeight):
        group_size = np.int64(weights.group_size or 0)
        arrays = weights.values, weights.scales
        return library.call("verax_grouped_linear_quantized", shape, x, groups, *arrays, group_size=group_size)
    return library.call("verax_grouped_linear", shape, x, groups, weights, many=False)


@jax.custom_jvp
def _many_products(x: Float[Array, "M D"], weights: Any, groups: Int[Array, "R"]) -> Float[Array, "R F"]:
    shape = groups.shape[0], weights.shape[1]
    x, groups = x.astype(weights.dtype), groups.astype(jnp.int32)
    return library.call("verax_grouped_linear", shape, x, groups, weights, many=True)


def _plain(x: Float[Array, "M D"], weights: Any, groups: Int[Array, "R"]) -> Float[Array, "R F"]:
    return grouped_linear.reference(jnp.repeat(x, groups.shape[0] // x.shape[0], axis=0), weights, groups)


@_products.defjvp
def _products_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return _products(*primals), jax.jvp(_plain, primals, tangents)[1]


@_many_products.defjvp
def _many_products_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return _many_products(*primals), jax.jvp(_plain, primals, tangents)[1]


def _flat(
    x: Float[Array, "*#B D"], groups: Int[Array, "*#B"]
) -> tuple[Float[Array, "M D"], Int[Array, "R"], tuple[int, ...]]:
    """Rows of x, the group of each row of y, and the leading axes of y. A row of x that several share is not copied."""
    leading = jnp.broadcast_shapes(x.shape[:-1], groups.shape)
    shared = x.ndim > 1 and x.shape[-2] == 1  # by the last of the axes
    own = (*leading[:-1], 1) if shared else leading
    rows = jnp.broadcast_to(x, (*own, x.shape[-1])).reshape(-1, x.shape[-1])
    return rows, jnp.broadcast_to(groups, leading).reshape(-1), leading


@grouped_linear.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _grouped_linear_native(x: Float[Array, "*#B D"], weights: Stack, groups: Int[Array, "*#B"]) -> Float[Array, "*B F"]:
    rows, groups, leading = _flat(x, groups)
    return _products(rows, weights, groups).reshape(*leading, weights.shape[1])


@grouped_linear.implementation("native_gemm", **library.REQUIREMENTS, accepts=_accepts_many)
def _grouped_linear_native_gemm(
    x: Float[Array, "*#B D"], weights: Float[Array, "E F D"], groups: Int[Array, "*#B"]
) -> Float[Array, "*B F"]:
    rows, groups, leading = _flat(x, groups)
    return _many_products(rows, weights, groups).reshape(*leading, weights.shape[1])
