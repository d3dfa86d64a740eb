"""Native implementations of `ops.linear`: few rows of x, at the speed at which the weight comes from memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax.ops.block_quantized import BLOCK_KINDS, BlockQuantizedWeight
from verax.ops.cpu import library
from verax.ops.linear import Quantized, Weight, linear, multi_linear, rounded_to
from verax.ops.packed import PackedWeight
from verax.ops.quantized import QuantizedWeight

__all__: list[str] = []

MAX_ROWS = 32
"""Most rows at which XLA's matmul library is slower: 1.2 times for a 4096 x 11008 weight (`verax bench ops`)."""

MAX_ROWS_QUANTIZED = 128
"""Most rows with a quantised weight, which XLA has to write out as bfloat16 first: 1.1 to 3.4 times slower at 128 rows.
At 512 it would still be so for 4 bits, but there x is better kept in bfloat16 than in 8 bits."""


def _accepts(x: Any, weight: Any, bias: Any = None) -> bool:
    if isinstance(weight, PackedWeight):
        return False
    if isinstance(weight, Quantized):
        few = _has_kernel(weight) and math.prod(x.shape[:-1]) <= MAX_ROWS_QUANTIZED
    else:
        few = math.prod(x.shape[:-1]) <= MAX_ROWS and weight.dtype in (jnp.float32, jnp.bfloat16)
    return few


def _has_kernel(weight: Quantized) -> bool:
    if isinstance(weight, BlockQuantizedWeight):
        return True
    if weight.rounds_inputs:
        return False
    return weight.order is None and (weight.zeros is None or weight.bits == 4)


def _accepts_multi(x: Any, weights: Sequence[Any], biases: Any = None, dtypes: Any = None) -> bool:
    if any(isinstance(weight, PackedWeight) for weight in weights):
        return False
    return len({_kind(weight) for weight in weights}) == 1 and linear.select(x, weights[0]).function is _linear_native


def _kind(weight: Any) -> tuple[Any, ...]:
    """Properties that all weights of a call share."""
    if isinstance(weight, QuantizedWeight):
        return weight.values.dtype, weight.group_size, weight.scales.dtype, _has_kernel(weight)
    return (type(weight),) if isinstance(weight, BlockQuantizedWeight) else (weight.dtype,)


@jax.custom_jvp
def _products(x: Float[Array, "M D"], weights: tuple[Any, ...]) -> tuple[Array, ...]:
    x = x.astype(jnp.float32)
    results = [jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32) for weight in weights]
    handler, arrays = "verax_linear", list[Any]()
    attributes: dict[str, Any] = {}
    for weight in weights:
        if isinstance(weight, QuantizedWeight):
            handler, attributes = "verax_linear_quantized", {"group": np.int64(weight.group_size or 0)}
            arrays += [weight.values, weight.scales, jnp.zeros(0, jnp.int8) if weight.zeros is None else weight.zeros]
        elif isinstance(weight, BlockQuantizedWeight):
            kinds = [BLOCK_KINDS[one.kind].number for one in weights]
            handler, attributes = "verax_linear_blocks", {"kinds": np.asarray(kinds, np.int64)}
            arrays.append(weight.words)
        else:
            arrays.append(weight)
    return tuple(library.call_many(handler, results, x, *arrays, **attributes))


@_products.defjvp
def _products_jvp(primals: tuple[Array, Any], tangents: tuple[Array, Any]) -> tuple[Any, Any]:
    _, tangent = jax.jvp(lambda x, weights: tuple(linear.reference(x, w) for w in weights), primals, tangents)
    return _products(*primals), tangent


@multi_linear.implementation("native", **library.REQUIREMENTS, accepts=_accepts_multi)
def _multi_linear_native(
    x: Float[Array, "*B D"],
    weights: Sequence[Any],
    biases: Sequence[Any] | None = None,
    dtypes: Sequence[DTypeLike] | None = None,
) -> tuple[Array, ...]:
    rows = _products(x.reshape(-1, x.shape[-1]), tuple(weights))
    ys = [y.reshape(*x.shape[:-1], y.shape[-1]) for y in rows]
    pairs = zip(ys, biases or [None] * len(ys), strict=True)
    return rounded_to((y if bias is None else y + bias.astype(jnp.float32) for y, bias in pairs), dtypes)


@linear.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _linear_native(
    x: Float[Array, "*B D"], weight: Weight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    return _multi_linear_native(x, [weight], [bias])[0]


def _accepts_zero_points(x: Any, weight: Any, bias: Any = None) -> bool:
    asymmetric = isinstance(weight, QuantizedWeight) and weight.order is None and weight.zeros is not None
    return asymmetric and weight.bits == 8 and math.prod(x.shape[:-1]) <= MAX_ROWS_QUANTIZED


@linear.implementation("native_zero_points", **library.REQUIREMENTS, accepts=_accepts_zero_points)
def _linear_native_zero_points(
    x: Float[Array, "*B D"], weight: QuantizedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    # Products with the integers as they are, less what their zero points add: x (q - z) s = x q s - sum(x) z s.
    assert weight.zeros is not None
    y = _linear_native(x, replace(weight, zeros=None), bias)
    groups = x.astype(jnp.bfloat16).astype(jnp.float32).reshape(*x.shape[:-1], weight.zeros.shape[1], -1)
    return y - linear(jnp.sum(groups, axis=-1), weight.zeros * weight.scales.astype(jnp.float32))
