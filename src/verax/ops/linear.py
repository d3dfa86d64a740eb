"""`y = x W^T + b`, with the weight as PyTorch stores it, or quantised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax.errors import InvalidParameterError
from verax.ops._dispatch import Example, bfloat16, check_shapes, differentiated_as, float32, operation
from verax.ops.block_quantized import BlockQuantizedWeight
from verax.ops.packed import PackedWeight
from verax.ops.pointwise import gelu
from verax.ops.quantized import QuantizedWeight, round_inputs

Quantized = QuantizedWeight | BlockQuantizedWeight
Weight = Float[Array, "F D"] | Quantized | PackedWeight


def _check(x: Any, weight: Any, bias: Any = None, *, names: tuple[str, str] = ("weight", "bias")) -> None:
    shape, inputs = getattr(weight, "shape", ()), getattr(x, "shape", ())
    if len(shape) != 2 or inputs[-1:] != shape[1:]:
        raise InvalidParameterError(
            f"{names[0]}: expected [F, D] for x [..., D], got {list(shape)} for {list(np.shape(x))}"
        )
    check_shapes(**{names[1]: (bias, shape[:1])})


@operation(check=_check)
def linear(x: Float[Array, "*B D"], weight: Weight, bias: Float[Array, "F"] | None = None) -> Float[Array, "*B F"]:
    """`x W^T + b` in float32: the inputs are rounded to the weight's dtype, products are accumulated in float32.

    The result stays float32, so that what lies between two matmuls (norms, residual sums, activations) is not rounded.
    With a quantised weight the inputs are rounded to bfloat16; values, zero points and scales are exact. A CPU that
    multiplies integers (AVX-512 VNNI) rounds them to integers instead: of 16 bits, with a scale for each 1,024 inputs,
    with 8-bit integers, and of 8 bits, with a scale for each group, with 4-bit ones. With the block formats of
    GGUF files every CPU rounds few rows to integers of 16 bits, with a scale for each 32 inputs. With many rows, inputs
    and weights are rounded to bfloat16 where the CPU multiplies it; other x86 CPUs take such integers there too. Not
    finite inputs then give NaN.

    With a weight that rounds its inputs, these become integers of 8 bits on every platform, with a scale for each row
    of x; what they add up to is exact. A packed weight (`pack_weight`) gives what the weight itself gives.

    Derivatives pass roundings of the inputs as if there were none.

    Raises:
        InvalidParameterError: for an array of integers, which says nothing about their scales, or shapes that do
            not fit.
    """
    if isinstance(weight, PackedWeight):
        weight = weight.unpacked()
    if _rounds_inputs(weight):
        x, weight = _rounded(x), weight.dequantize()
    elif isinstance(weight, Quantized):
        x, weight = x.astype(jnp.bfloat16).astype(jnp.float32), weight.dequantize()
    elif not jnp.issubdtype(weight.dtype, jnp.floating):
        raise InvalidParameterError(f"weight: expected floats or a QuantizedWeight, got {weight.dtype}")
    # HIGHEST matters to float32 weights only, where a GPU or TPU would otherwise multiply in TF32 or bfloat16.
    y = jnp.einsum(
        "...d,fd->...f",
        x.astype(weight.dtype),
        weight,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return _add(y, bias)


linear.examples = [
    Example((float32(rows, 1024), bfloat16(3072, 1024)), label=label) for rows, label in ((1, "1 row"), (4, "4 rows"))
]


def _check_several(
    x: Any, weights: Sequence[Any], biases: Sequence[Any] | None = None, dtypes: Sequence[Any] | None = None
) -> None:
    for name, given in (("biases", biases), ("dtypes", dtypes)):
        if given is not None and len(given) != len(weights):
            raise InvalidParameterError(f"{name}: expected one for each of {len(weights)} weights, got {len(given)}")
    for i, (weight, bias) in enumerate(zip(weights, biases or [None] * len(weights), strict=True)):
        _check(x, weight, bias, names=(f"weights[{i}]", f"biases[{i}]"))


@operation(fused=True, check=_check_several)
def multi_linear(
    x: Float[Array, "*B D"],
    weights: Sequence[Weight],
    biases: Sequence[Array | None] | None = None,
    dtypes: Sequence[DTypeLike] | None = None,
) -> tuple[Array, ...]:
    """Results of `linear(x, W, b)`, `[*B, F]`, for several weights `[F, D]`, such as for queries, keys and values.

    Single biases `[F]`, or all of them, may be None. The results are rounded to `dtypes`, or stay float32.
    """
    ys = (linear(x, *pair) for pair in zip(weights, biases or [None] * len(weights), strict=True))
    return rounded_to(ys, dtypes)


def rounded_to(ys: Iterable[Array], dtypes: Sequence[DTypeLike] | None) -> tuple[Array, ...]:
    """Arrays in these dtypes, or unchanged if `dtypes` is None."""
    return tuple(ys) if dtypes is None else tuple(y.astype(dtype) for y, dtype in zip(ys, dtypes, strict=True))


multi_linear.examples = [Example((float32(4, 1024), [bfloat16(3072, 1024)] * 3), label="4 rows")]


def _check_mlp(
    x: Any, up: Any, down: Any, up_bias: Any = None, down_bias: Any = None, *, approximate: bool = False
) -> None:
    _check(x, up, up_bias, names=("up", "up_bias"))
    check_shapes(down=(down, (down.shape[0], up.shape[0])), down_bias=(down_bias, down.shape[:1]))


@operation(fused=True, check=_check_mlp)
def gelu_mlp(
    x: Float[Array, "*B D"],
    up: Float[Array, "H D"] | Quantized | PackedWeight,
    down: Float[Array, "F H"] | Quantized | PackedWeight,
    up_bias: Float[Array, "H"] | None = None,
    down_bias: Float[Array, "F"] | None = None,
    *,
    approximate: bool = False,
) -> Float[Array, "*B F"]:
    """`linear(gelu(linear(x, up, up_bias)), down, down_bias)`, with weights `[H, D]` and `[F, H]`.

    `approximate` GELU is by tanh, as `jax.nn.gelu` has it.
    """
    hidden = linear(x, up, up_bias)
    hidden = jax.nn.gelu(hidden, approximate=True) if approximate else gelu(hidden)
    return linear(hidden, down, down_bias)


gelu_mlp.examples = [Example((float32(64, 384), float32(1536, 384), float32(384, 1536), float32(1536), float32(384)))]


def _check_swiglu(x: Any, gate: Any, up: Any, gate_bias: Any = None, up_bias: Any = None) -> None:
    _check(x, gate, gate_bias, names=("gate", "gate_bias"))
    check_shapes(up=(up, gate.shape), up_bias=(up_bias, gate.shape[:1]))


@operation(fused=True, check=_check_swiglu)
def swiglu(
    x: Float[Array, "*B D"],
    gate: Weight,
    up: Weight,
    gate_bias: Float[Array, "F"] | None = None,
    up_bias: Float[Array, "F"] | None = None,
) -> Float[Array, "*B F"]:
    """`silu(linear(x, gate, gate_bias)) * linear(x, up, up_bias)`, with weights `[F, D]` (SwiGLU, arXiv:2002.05202)."""
    return jax.nn.silu(linear(x, gate, gate_bias)) * linear(x, up, up_bias)


swiglu.examples = [Example((float32(64, 1024), bfloat16(3072, 1024), bfloat16(3072, 1024)))]


CONCATENATED_ROWS, CONCATENATED_SIZE = 256, 512
"""Least rows of x, and most rows of each weight. Otherwise concatenating the weights takes longer than it saves.
A LAM's layer is nearly twice as fast with it on a CPU. An accelerator would write the weights again in every step."""


def _can_be_concatenated(x: Any, weights: Sequence[Any], biases: object = None, dtypes: object = None) -> bool:
    if any(isinstance(weight, Quantized | PackedWeight) for weight in weights):
        return False
    return len({weight.dtype for weight in weights}) == 1


def _is_worth_concatenating(x: Any, weights: Sequence[Any], biases: object = None, dtypes: object = None) -> bool:
    rows, largest = math.prod(x.shape[:-1]), max(weight.shape[0] for weight in weights)
    return rows >= CONCATENATED_ROWS and largest <= CONCATENATED_SIZE


@multi_linear.implementation(
    "concatenated", platforms=("cpu",), accepts=_can_be_concatenated, faster=_is_worth_concatenating
)
def _multi_linear_concatenated(
    x: Float[Array, "*B D"],
    weights: Sequence[Array],
    biases: Sequence[Array | None] | None = None,
    dtypes: Sequence[DTypeLike] | None = None,
) -> tuple[Array, ...]:
    ends = np.cumsum([weight.shape[0] for weight in weights])[:-1]
    ys = jnp.split(linear(x, jnp.concatenate(weights)), ends, axis=-1)
    return rounded_to(map(_add, ys, biases or [None] * len(ys)), dtypes)


def _is_quantized(x: object, weight: object, bias: object = None) -> bool:
    return isinstance(weight, Quantized) and not _rounds_inputs(weight)


@linear.implementation("dequantized", accepts=_is_quantized)
def _linear_dequantized(
    x: Float[Array, "*B D"], weight: Quantized, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    # For many rows, which share the cost. A row's scale can wait until after the product, whose values bfloat16
    # holds exactly; scales of groups cannot, so there the weight is rounded to bfloat16.
    if isinstance(weight, QuantizedWeight) and weight.group_size is None:
        return _add(linear(x, weight.unscaled()) * weight.row_scales()[:, 0].astype(jnp.float32), bias)
    return linear(x, weight.dequantize(jnp.bfloat16), bias)


def _rounds_inputs(weight: object) -> TypeGuard[QuantizedWeight]:
    return isinstance(weight, QuantizedWeight) and weight.rounds_inputs


@linear.implementation("integers", accepts=lambda x, weight, bias=None: _rounds_inputs(weight))
def _linear_integers(
    x: Float[Array, "*B D"], weight: QuantizedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    def product(x: Array, weight: QuantizedWeight, bias: Array | None) -> Array:
        integers, scale = round_inputs(x)
        sums = jnp.einsum("...d,fd->...f", integers, weight.values, preferred_element_type=jnp.int32)
        return _add(sums.astype(jnp.float32) * scale * weight.scales[:, 0].astype(jnp.float32), bias)

    return differentiated_as(linear.reference, product, x, weight, bias)


@jax.custom_jvp
def _rounded(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Inputs as `round_inputs` leaves them. Their derivative is 1, as that of any rounding in this module."""
    integers, scale = round_inputs(x)
    return integers.astype(jnp.float32) * scale


_rounded.defjvps(lambda tangent, rounded, x: tangent.astype(rounded.dtype))


def _is_reordered(x: object, weight: object, bias: object = None) -> bool:
    return isinstance(weight, QuantizedWeight) and weight.order is not None


@linear.implementation("reordered", accepts=_is_reordered)
def _linear_reordered(
    x: Float[Array, "*B D"], weight: QuantizedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    # Inputs in the order of the columns, as if groups had been neighbours in the first place: the product is the same.
    # The barrier keeps XLA:CPU from taking the inputs transposed, for which it has no product of bfloat16.
    x = jax.lax.optimization_barrier(x[..., weight.order])
    return linear(x, replace(weight, order=None), bias)


def _add(y: Float[Array, "*B F"], bias: Float[Array, "F"] | None) -> Float[Array, "*B F"]:
    return y if bias is None else y + bias.astype(jnp.float32)


def _is_single_row(x: jax.Array | jax.ShapeDtypeStruct, weight: object, bias: object = None) -> bool:
    return math.prod(x.shape[:-1]) == 1 and not isinstance(weight, Quantized | PackedWeight)


@linear.implementation("pad_to_two_rows", platforms=("cpu", "tpu"), accepts=_is_single_row)
def _linear_pad_to_two_rows(
    x: Float[Array, "*B D"], weight: Float[Array, "F D"], bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    # XLA:CPU leaves a one-row product to generic code that converts the whole weight first: 15 times slower than two
    # rows, which its matmul library takes (facts in docs/performance.md). XLA:TPU adds a row's products up in vector
    # registers, and multiplies two rows in the matrix unit (estimates in docs/accelerators.md).
    row = x.reshape(1, -1)
    y = linear.reference(jnp.concatenate([row, row]), weight, bias)
    return y[0].reshape(*x.shape[:-1], weight.shape[0])
