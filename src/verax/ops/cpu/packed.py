"""Native implementation of `ops.linear` for weights that were packed once: products of many rows without packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax.ops._dispatch import differentiated_as
from verax.ops.block_quantized import BlockQuantizedWeight
from verax.ops.cpu import library
from verax.ops.cpu.linear import DOT, MOST_INTEGERS, TILES, VECTORS, takes
from verax.ops.linear import Weight, gelu_mlp, linear, multi_linear, rounded_to, swiglu
from verax.ops.packed import PackedWeight, pack_weight
from verax.ops.pointwise import gelu
from verax.ops.quantized import QuantizedWeight

__all__: list[str] = []


def _accepts_weight(weight: Any, *, few_rows: bool = False) -> bool:
    if isinstance(weight, PackedWeight | BlockQuantizedWeight) or len(weight.shape) != 2 or not takes(weight):
        return False
    if few_rows and not library.has(DOT):  # without AVX-512, the kernel reads a panel in three passes
        return False
    if isinstance(weight, QuantizedWeight):
        return weight.rounds_inputs and library.has(DOT) and weight.shape[1] <= MOST_INTEGERS
    if weight.dtype == jnp.bfloat16:  # tiles read unpacked weights
        return library.has(DOT) and not library.has(TILES)
    return weight.dtype == jnp.float32 and library.has(VECTORS)


@pack_weight.implementation("native", **library.REQUIREMENTS, accepts=_accepts_weight)
def _pack_weight_native(weight: Any, *, few_rows: bool = False) -> PackedWeight:
    return PackedWeight.from_weight(weight)


def _accepts(x: Any, weight: Any, bias: Any = None) -> bool:
    return isinstance(weight, PackedWeight)


def _accepts_multi(x: Any, weights: Sequence[Any], biases: Any = None, dtypes: Sequence[Any] | None = None) -> bool:
    if any(jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16) for dtype in dtypes or ()):
        return False
    return all(isinstance(weight, PackedWeight) for weight in weights) and len({one.kind for one in weights}) == 1


def _arrays(weights: Sequence[PackedWeight], biases: Sequence[Array | None]) -> list[Array]:
    """Panels, scales and bias of each weight, where an empty array stands for none."""
    arrays = list[Array]()
    for weight, bias in zip(weights, biases, strict=True):
        last = (jnp.zeros(0) if one is None else one.astype(jnp.float32) for one in (weight.scales, bias))
        arrays += [weight.cells, *last]
    return arrays


@multi_linear.implementation("native_packed", **library.REQUIREMENTS, accepts=_accepts_multi)
def _multi_linear_native_packed(
    x: Float[Array, "*B D"],
    weights: Sequence[Any],
    biases: Sequence[Any] | None = None,
    dtypes: Sequence[DTypeLike] | None = None,
) -> tuple[Array, ...]:
    of_results = tuple(dtypes or [jnp.float32] * len(weights))

    def reference(x: Array, weights: Sequence[Weight], biases: Sequence[Array | None]) -> tuple[Array, ...]:
        ys = (linear.reference(x, *pair) for pair in zip(weights, biases, strict=True))
        return rounded_to(ys, of_results)

    def kernel(x: Array, weights: Sequence[PackedWeight], biases: Sequence[Array | None]) -> tuple[Array, ...]:
        shapes = ((x.shape[0], weight.shape[0]) for weight in weights)
        results = [jax.ShapeDtypeStruct(*result) for result in zip(shapes, of_results, strict=True)]
        return tuple(library.call_many("verax_gemm_panels", results, x.astype(jnp.float32), *_arrays(weights, biases)))

    rows = x.reshape(-1, x.shape[-1])
    ys = differentiated_as(reference, kernel, rows, tuple(weights), tuple(biases or [None] * len(weights)))
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys)


@linear.implementation("native_packed", **library.REQUIREMENTS, accepts=_accepts)
def _linear_native_packed(
    x: Float[Array, "*B D"], weight: PackedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    return _multi_linear_native_packed(x, [weight], [bias])[0]


def _of_pair(
    handler: str,
    reference: Callable[..., Array],
    x: Float[Array, "*B D"],
    weights: tuple[PackedWeight, PackedWeight],
    biases: tuple[Array | None, Array | None],
) -> Float[Array, "*B F"]:
    """Result of a handler that takes two weights, `[*B, F]` with the second's F.

    Args:
        handler: its name.
        reference: function of the rows of x, the weights and the biases, for the derivative.
        x, weights, biases: arguments.
    """

    def kernel(x: Array, weights: Sequence[PackedWeight], biases: Sequence[Array | None]) -> Array:
        shape = x.shape[0], weights[1].shape[0]
        return library.call(handler, shape, x.astype(jnp.float32), *_arrays(weights, biases))

    y = differentiated_as(reference, kernel, x.reshape(-1, x.shape[-1]), weights, biases)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _mlp_reference(x: Array, weights: tuple[Weight, Weight], biases: tuple[Array | None, Array | None]) -> Array:
    hidden = gelu.reference(linear.reference(x, weights[0], biases[0]))
    return linear.reference(hidden, weights[1], biases[1])


def _swiglu_reference(x: Array, weights: tuple[Weight, Weight], biases: tuple[Array | None, Array | None]) -> Array:
    gate, up = (linear.reference(x, *pair) for pair in zip(weights, biases, strict=True))
    return jax.nn.silu(gate) * up


def _accepts_pair(x: Any, first: Any, second: Any, first_bias: Any = None, second_bias: Any = None) -> bool:
    return _accepts_multi(x, [first, second])


@gelu_mlp.implementation("native_packed", **library.REQUIREMENTS, accepts=_accepts_pair)
def _gelu_mlp_native_packed(
    x: Float[Array, "*B D"],
    up: PackedWeight,
    down: PackedWeight,
    up_bias: Float[Array, "H"] | None = None,
    down_bias: Float[Array, "F"] | None = None,
) -> Float[Array, "*B F"]:
    return _of_pair("verax_mlp_panels", _mlp_reference, x, (up, down), (up_bias, down_bias))


@swiglu.implementation("native_packed", **library.REQUIREMENTS, accepts=_accepts_pair)
def _swiglu_native_packed(
    x: Float[Array, "*B D"],
    gate: PackedWeight,
    up: PackedWeight,
    gate_bias: Float[Array, "F"] | None = None,
    up_bias: Float[Array, "F"] | None = None,
) -> Float[Array, "*B F"]:
    return _of_pair("verax_swiglu_panels", _swiglu_reference, x, (gate, up), (gate_bias, up_bias))
