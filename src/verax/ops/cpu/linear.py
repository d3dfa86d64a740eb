"""C++ kernels of `ops.linear` and `ops.grouped_linear`: few rows of x at the speed at which the weight comes from
memory; many rows by blocks of both operands that are packed and multiplied in cache; rows in groups, of which only
those matrices are read that have rows; and weights that were packed once, whose products need no packing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import differentiated_as, used_rows
from verax.ops.block_quantized import BLOCK_KINDS, BlockQuantizedWeight
from verax.ops.cpu import library
from verax.ops.grouped import Stack, grouped_linear
from verax.ops.linear import Quantized, Weight, gelu_mlp, linear, multi_linear, rounded_to, swiglu
from verax.ops.packed import CELL_VALUES, ROUNDED_CELL_VALUES, PackedWeight, pack_weight
from verax.ops.quantized import QuantizedWeight

MAX_ROWS = 32
"""Most rows at which XLA's matmul library is slower: 1.2 times for a 4096 x 11008 weight (`verax bench ops`)."""

MAX_ROWS_QUANTIZED = 128
"""Most rows with a quantised weight, which XLA has to write out as bfloat16 first: 1.1 to 3.4 times slower at 128 rows.
4-bit weights have no limit without AMX: XLA takes 1.5 to 2 times as long with 512 rows, and 1 to 1.7 with 2,048."""


def _accepts(x: Any, weight: Any, bias: Any = None) -> bool:
    if isinstance(weight, Quantized):
        return _has_kernel(weight)
    if x.shape[-1] == 0:
        return False
    return not isinstance(weight, PackedWeight) and weight.dtype in (jnp.float32, jnp.bfloat16)


def _is_faster(x: Any, weight: Any, bias: Any = None) -> bool:
    rows = MAX_ROWS_QUANTIZED if isinstance(weight, Quantized) else MAX_ROWS
    if isinstance(weight, Quantized) and _is_int4(weight) and not library.has(TILES):
        rows = sys.maxsize
    return math.prod(x.shape[:-1]) <= rows


def _is_int4(weight: Quantized) -> bool:
    return isinstance(weight, QuantizedWeight) and weight.bits == 4


def _has_kernel(weight: Quantized) -> bool:
    if isinstance(weight, BlockQuantizedWeight):
        return True
    if weight.rounds_inputs:
        return False
    return weight.order is None and (weight.zeros is None or _is_int4(weight))


def _accepts_multi(x: Any, weights: Sequence[Any], biases: Any = None, dtypes: Any = None) -> bool:
    if any(isinstance(weight, PackedWeight) for weight in weights):
        return False
    return len({_kind(weight) for weight in weights}) == 1 and linear.select(x, weights[0]).function is _linear_native


def _kind(weight: Any) -> tuple[Any, ...]:
    """Properties that all weights of a call share."""
    if isinstance(weight, QuantizedWeight):
        return weight.values.dtype, weight.group_size, weight.scales.dtype, _has_kernel(weight)
    return (type(weight),) if isinstance(weight, BlockQuantizedWeight) else (weight.dtype,)


def _products(used: Array | np.ndarray, x: Float[Array, "M D"], weights: tuple[Any, ...]) -> tuple[Array, ...]:
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
    return tuple(library.call_many(handler, results, x, used, *arrays, **attributes))


def _product_references(x: Array, weights: tuple[Any, ...]) -> tuple[Array, ...]:
    return tuple(linear.reference(x, weight) for weight in weights)


@multi_linear.implementation("native", **library.REQUIREMENTS, accepts=_accepts_multi)
def _multi_linear_native(
    x: Float[Array, "*B D"],
    weights: Sequence[Any],
    biases: Sequence[Any] | None = None,
    dtypes: Sequence[DTypeLike] | None = None,
) -> tuple[Array, ...]:
    kernel = partial(_products, used_rows(x.shape[:-1]))
    rows = differentiated_as(_product_references, kernel, x.reshape(-1, x.shape[-1]), tuple(weights))
    ys = [y.reshape(*x.shape[:-1], y.shape[-1]) for y in rows]
    pairs = zip(ys, biases or [None] * len(ys), strict=True)
    return rounded_to((y if bias is None else y + bias.astype(jnp.float32) for y, bias in pairs), dtypes)


@linear.implementation("native", **library.REQUIREMENTS, accepts=_accepts, faster=_is_faster)
def _linear_native(
    x: Float[Array, "*B D"], weight: Weight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    return _multi_linear_native(x, [weight], [bias])[0]


def _accepts_zero_points(x: Any, weight: Any, bias: Any = None) -> bool:
    asymmetric = isinstance(weight, QuantizedWeight) and weight.order is None and weight.zeros is not None
    return asymmetric and weight.bits == 8 and not weight.rounds_inputs


@linear.implementation("native_zero_points", **library.REQUIREMENTS, accepts=_accepts_zero_points, faster=_is_faster)
def _linear_native_zero_points(
    x: Float[Array, "*B D"], weight: QuantizedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    # Products with the stored integers, less what their zero points add: x (q - z) s = x q s - sum(x) z s.
    assert weight.zeros is not None
    y = _linear_native(x, replace(weight, zeros=None), bias)
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], weight.zeros.shape[1], -1)  # the kernel keeps 16 bits of x
    return y - linear(jnp.sum(groups, axis=-1), weight.zeros * weight.scales.astype(jnp.float32))


MIN_ROWS = {"float32": 12, "bfloat16": 24, "int8": MAX_ROWS_QUANTIZED + 1, "blocks": MAX_ROWS_QUANTIZED + 1}
"""Rows from which it is faster than the kernel for few rows, by dtype of the weight (`verax bench ops`). With int8
that is 24, but it rounds x to bfloat16 where the other keeps 16 bits: an answer should not depend on its batch."""

MIN_ROWS_OF_BLOCKS = 33
"""`MIN_ROWS` of blocks on a processor with AMX: 1.3 times faster for 32 rows, and 2.4 times for 128; and on one that
multiplies integers of 16 bits, but not bfloat16: 1.1 to 1.7 times for 32 to 128 (AVX2). Below it, up to 32 sequences at
a time, an answer does not depend on its batch."""

MIN_ROWS_AS_FLOATS = 12
"""`MIN_ROWS` of bfloat16 on a processor that does not multiply it: 1.2 to 1.5 times faster (AVX2)."""

TOO_MANY = 512
"""Rows from which XLA's matmul library is as fast, and for some shapes faster. Quantised weights it has to write out as
bfloat16 first: for them it never is. The same goes for bfloat16 on a processor that does not multiply it: XLA writes
float32, and takes 1.2 to 1.8 times as long for 32 to 2,048 rows (AVX2). ARM is taken for such a processor."""

TOO_MANY_FLOATS = 33
"""`TOO_MANY` of float32 without AVX-512."""

TILE_ROWS = range(5, 128)
"""Rows for which it is faster with bfloat16 on a processor with AMX, which multiplies 16 of them in the time of one.
XLA's library has AMX too: for 16 to 64 rows it takes 1.2 to 1.5 times the processor time, from 128 on 0.7 to 1.4."""

DEPTH_STEP, COLUMN_STEP = 32, 16
"""Divisors of a row's inputs and of the weight's rows that the kernel requires (`GEMM_DEPTH_STEP` in native/)."""

DOT = "bf16_dot"
"""Capability of a processor that multiplies bfloat16."""

BYTES = "byte_dot"
"""Capability of a processor that multiplies 8-bit integers (VNNI of 256 or 512 bits, ARM's DotProd)."""

HALVES = "half_dot"
"""Capability of a processor that multiplies pairs of 16-bit integers (VNNI, and in two instructions AVX2)."""

TILES = "bf16_tiles"
"""Capability of AMX."""

VECTORS = "fma"
"""Capability without which the kernel has no registers for its sums."""


def _accepts_gemm(x: Any, weight: Any, bias: Any = None) -> bool:
    return _gemm_kind(weight) is not None and takes(weight)


def _is_gemm_faster(x: Any, weight: Any, bias: Any = None) -> bool:
    if (kind := _gemm_kind(weight)) is None:
        return False
    rows, faster = math.prod(x.shape[:-1]), faster_rows(kind)
    # XLA's library multiplies padding too.
    return rows in faster or (bool(faster) and rows >= faster.start and used_rows(x.shape[:-1]).size > 0)


def faster_rows(kind: str) -> range:
    """Numbers of rows for which it is faster here than XLA and the kernel for few rows.

    Args:
        kind: dtype of the weight, or "blocks" of GGUF files.
    """
    least, dot = MIN_ROWS[kind], library.has(DOT)
    dot_of_xla = dot and library.has(HALVES)  # on x86
    if not library.has(VECTORS):
        return range(0)
    if kind == "float32":
        return range(least, TOO_MANY if dot_of_xla else TOO_MANY_FLOATS)
    if kind == "bfloat16":
        if library.has(TILES):
            return TILE_ROWS
        return range(least if dot else MIN_ROWS_AS_FLOATS, TOO_MANY if dot_of_xla else sys.maxsize)
    if kind == "blocks" and (library.has(TILES) or (library.has(HALVES) and not dot)):
        least = MIN_ROWS_OF_BLOCKS
    return range(least, sys.maxsize)


def _gemm_kind(weight: Any) -> str | None:
    """Dtype of a weight that the kernel takes; "blocks" of GGUF files."""
    if isinstance(weight, PackedWeight):
        return None
    if isinstance(weight, BlockQuantizedWeight):
        return "blocks"
    if isinstance(weight, QuantizedWeight):
        if weight.rounds_inputs:
            return None
        return "int8" if weight.is_plain and weight.bits == 8 and weight.group_size is None else None
    return str(weight.dtype) if weight.dtype in (jnp.float32, jnp.bfloat16) else None


def takes(weight: Any) -> bool:
    """True if the kernel takes a weight of this shape."""
    F, D = weight.shape
    return F % COLUMN_STEP == 0 and D % DEPTH_STEP == 0 and D > 0


def _product(
    used: Array | np.ndarray,
    x: Float[Array, "M D"],
    weight: Float[Array, "F D"] | Quantized,
    bias: Float[Array, "F"] | None,
) -> Float[Array, "M F"]:
    scales, kind = None, 0
    if isinstance(weight, QuantizedWeight):
        matrix, scales = weight.values, weight.scales[:, 0]
    elif isinstance(weight, BlockQuantizedWeight):
        matrix, kind = weight.words, BLOCK_KINDS[weight.kind].number
    else:
        matrix = weight
    floats = matrix.dtype == jnp.float32 or (matrix.dtype == jnp.uint32 and not library.has(DOT))
    x = x.astype(jnp.float32 if floats else jnp.bfloat16)
    last = map(library.optional, (scales, bias))
    shape = x.shape[0], weight.shape[0]
    return library.call("verax_gemm", shape, x, used, matrix, *last, block_kind=np.int64(kind))


@linear.implementation("native_gemm", **library.REQUIREMENTS, accepts=_accepts_gemm, faster=_is_gemm_faster)
def _linear_native_gemm(
    x: Float[Array, "*B D"], weight: Float[Array, "F D"] | Quantized, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    kernel = partial(_product, used_rows(x.shape[:-1]))
    y = differentiated_as(linear.reference, kernel, x.reshape(-1, x.shape[-1]), weight, bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


MOST_INTEGERS = 1 << 17
"""Most inputs of a row whose products 32-bit integers hold (`GEMM_INTEGER_DEPTH` in native/)."""


def _accepts_integers(x: Any, weight: Any, bias: Any = None) -> bool:
    rounds = isinstance(weight, QuantizedWeight) and weight.rounds_inputs
    return rounds and takes(weight) and weight.shape[1] <= MOST_INTEGERS


@linear.implementation("native_integers", **library.REQUIREMENTS, accepts=_accepts_integers)
def _linear_native_integers(
    x: Float[Array, "*B D"], weight: QuantizedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    used = used_rows(x.shape[:-1])

    def kernel(x: Array, weight: QuantizedWeight, bias: Array | None) -> Array:
        arrays = weight.values, weight.scales[:, 0].astype(jnp.float32), library.optional(bias)
        shape = len(x), weight.shape[0]
        return library.call("verax_gemm_int8", shape, x.astype(jnp.float32), used, *arrays)

    y = differentiated_as(linear.reference, kernel, x.reshape(-1, x.shape[-1]), weight, bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _accepts_grouped(x: Any, weights: Any, groups: Any) -> bool:
    if isinstance(weights, QuantizedWeight):
        return weights.zeros is None and weights.order is None and not weights.rounds_inputs
    return weights.dtype in (jnp.float32, jnp.bfloat16) and x.shape[-1] > 0


def _accepts_many(x: Any, weights: Any, groups: Any) -> bool:
    if isinstance(weights, QuantizedWeight) or not _accepts_grouped(x, weights, groups):
        return False
    return takes(jax.ShapeDtypeStruct(weights.shape[1:], weights.dtype))


def _is_faster_of_many(x: Any, weights: Any, groups: Any) -> bool:
    # By the mean of the groups, which the shapes give: how many rows a group has must not decide about their rounding.
    rows = math.prod(jnp.broadcast_shapes(x.shape[:-1], groups.shape)) / weights.shape[0]
    faster = faster_rows(str(weights.dtype))
    return bool(faster) and rows >= faster.start


def _grouped(
    kernel: Callable[..., Array], x: Float[Array, "*#B D"], weights: Stack, groups: Int[Array, "*#B"]
) -> Float[Array, "*B F"]:
    """Result of a kernel of `rows [M, D], weights, groups [R]`. A row that several groups share is not copied."""

    def reference(rows: Array, weights: Stack, groups: Array) -> Array:
        times = len(groups) // max(1, len(rows))
        return grouped_linear.reference(jnp.repeat(rows, times, axis=0), weights, groups)

    leading = jnp.broadcast_shapes(x.shape[:-1], groups.shape)
    shared = x.ndim > 1 and x.shape[-2] == 1  # by the last of the axes
    own = (*leading[:-1], 1) if shared else leading
    rows = jnp.broadcast_to(x, (*own, x.shape[-1])).reshape(-1, x.shape[-1])
    groups = jnp.broadcast_to(groups, leading)
    used = used_rows(leading[:-1])
    if used.size:  # padding has no group
        tokens = jnp.arange(math.prod(leading[:-1])).reshape(*leading[:-1], 1)
        groups = jnp.where(tokens < used, groups, -1)
    y = differentiated_as(reference, kernel, rows, weights, groups.reshape(-1))
    return y.reshape(*leading, weights.shape[1])


@grouped_linear.implementation("native", **library.REQUIREMENTS, accepts=_accepts_grouped)
def _grouped_linear_native(x: Float[Array, "*#B D"], weights: Stack, groups: Int[Array, "*#B"]) -> Float[Array, "*B F"]:
    def kernel(x: Array, weights: Stack, groups: Array) -> Array:
        handler, attributes = "verax_grouped_linear", dict[str, Any](many=False)
        if isinstance(weights, QuantizedWeight):
            handler, attributes = f"{handler}_quantized", {"group_size": np.int64(weights.group_size or 0)}
        arrays = x.astype(jnp.float32), groups.astype(jnp.int32), *jax.tree.leaves(weights)
        return library.call(handler, (len(groups), weights.shape[1]), *arrays, **attributes)

    return _grouped(kernel, x, weights, groups)


@grouped_linear.implementation("native_gemm", **library.REQUIREMENTS, accepts=_accepts_many, faster=_is_faster_of_many)
def _grouped_linear_native_gemm(
    x: Float[Array, "*#B D"], weights: Float[Array, "E F D"], groups: Int[Array, "*#B"]
) -> Float[Array, "*B F"]:
    def kernel(x: Array, weights: Array, groups: Array) -> Array:
        arrays = x.astype(weights.dtype), groups.astype(jnp.int32), weights
        return library.call("verax_grouped_linear", (len(groups), weights.shape[1]), *arrays, many=True)

    return _grouped(kernel, x, weights, groups)


def _accepts_packing(weight: Any, *, few_rows: bool = False) -> bool:
    if isinstance(weight, PackedWeight | BlockQuantizedWeight) or len(weight.shape) != 2 or not takes(weight):
        return False
    if isinstance(weight, QuantizedWeight) and weight.rounds_inputs:
        return (library.has(BYTES) or library.has(HALVES)) and weight.shape[1] <= MOST_INTEGERS
    if isinstance(weight, QuantizedWeight):
        return _gemm_kind(weight) == "int8" and library.has(HALVES) and not library.has(TILES)
    if few_rows and not (library.has(HALVES) and library.has(BYTES)):  # the kernel for few rows reads floats as fast
        return False
    if weight.dtype == jnp.bfloat16:
        return library.has(DOT)
    return weight.dtype == jnp.float32 and library.has(VECTORS)


@pack_weight.implementation("native", **library.REQUIREMENTS, accepts=_accepts_packing)
def _pack_weight_native(weight: Any, *, few_rows: bool = False) -> PackedWeight:
    return PackedWeight.from_weight(weight, ROUNDED_CELL_VALUES if library.has(BYTES) else CELL_VALUES["int8"])


def _accepts_packed(x: Any, weight: Any, bias: Any = None) -> bool:
    return isinstance(weight, PackedWeight)


def _accepts_packed_multi(
    x: Any, weights: Sequence[Any], biases: Any = None, dtypes: Sequence[Any] | None = None
) -> bool:
    if any(jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16) for dtype in dtypes or ()):
        return False
    are_packed = all(isinstance(weight, PackedWeight) for weight in weights)
    return are_packed and len({weight.cells.dtype for weight in weights}) == 1


def _arrays(weights: Sequence[PackedWeight], biases: Sequence[Array | None]) -> list[Array]:
    """Panels, scales and bias of each weight, where an empty array stands for none."""
    arrays = list[Array]()
    for weight, bias in zip(weights, biases, strict=True):
        arrays += [weight.cells, *map(library.optional, (weight.scales, bias))]
    return arrays


@multi_linear.implementation("native_packed", **library.REQUIREMENTS, accepts=_accepts_packed_multi)
def _multi_linear_native_packed(
    x: Float[Array, "*B D"],
    weights: Sequence[Any],
    biases: Sequence[Any] | None = None,
    dtypes: Sequence[DTypeLike] | None = None,
) -> tuple[Array, ...]:
    of_results, used = tuple(dtypes or [jnp.float32] * len(weights)), used_rows(x.shape[:-1])

    def reference(x: Array, weights: Sequence[Weight], biases: Sequence[Array | None]) -> tuple[Array, ...]:
        ys = (linear.reference(x, *pair) for pair in zip(weights, biases, strict=True))
        return rounded_to(ys, of_results)

    def kernel(x: Array, weights: Sequence[PackedWeight], biases: Sequence[Array | None]) -> tuple[Array, ...]:
        shapes = ((x.shape[0], weight.shape[0]) for weight in weights)
        results = [jax.ShapeDtypeStruct(*result) for result in zip(shapes, of_results, strict=True)]
        arrays = x.astype(jnp.float32), used, *_arrays(weights, biases)
        return tuple(library.call_many("verax_gemm_panels", results, *arrays))

    rows = x.reshape(-1, x.shape[-1])
    ys = differentiated_as(reference, kernel, rows, tuple(weights), tuple(biases or [None] * len(weights)))
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys)


@linear.implementation("native_packed", **library.REQUIREMENTS, accepts=_accepts_packed)
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
    **attributes: Any,
) -> Float[Array, "*B F"]:
    """Result of a handler that takes two weights, `[*B, F]` with the second's F.

    Args:
        handler: its name.
        reference: function of the rows of x, the weights and the biases, for the derivative.
        x, weights, biases: arguments.
        attributes: of the handler.
    """
    used = used_rows(x.shape[:-1])

    def kernel(x: Array, weights: Sequence[PackedWeight], biases: Sequence[Array | None]) -> Array:
        shape = x.shape[0], weights[1].shape[0]
        arrays = x.astype(jnp.float32), used, *_arrays(weights, biases)
        return library.call(handler, shape, *arrays, **attributes)

    y = differentiated_as(reference, kernel, x.reshape(-1, x.shape[-1]), weights, biases)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _swiglu_reference(x: Array, weights: tuple[Weight, Weight], biases: tuple[Array | None, Array | None]) -> Array:
    gate, up = (linear.reference(x, *pair) for pair in zip(weights, biases, strict=True))
    return jax.nn.silu(gate) * up


def _accepts_pair(
    x: Any, first: Any, second: Any, first_bias: Any = None, second_bias: Any = None, *, approximate: bool = False
) -> bool:
    return _accepts_packed_multi(x, [first, second])


@gelu_mlp.implementation("native_packed", **library.REQUIREMENTS, accepts=_accepts_pair)
def _gelu_mlp_native_packed(
    x: Float[Array, "*B D"],
    up: PackedWeight,
    down: PackedWeight,
    up_bias: Float[Array, "H"] | None = None,
    down_bias: Float[Array, "F"] | None = None,
    *,
    approximate: bool = False,
) -> Float[Array, "*B F"]:
    def reference(x: Array, weights: tuple[Weight, Weight], biases: tuple[Array | None, Array | None]) -> Array:
        return gelu_mlp.reference(x, *weights, *biases, approximate=approximate)

    return _of_pair("verax_mlp_panels", reference, x, (up, down), (up_bias, down_bias), approximate=approximate)


@swiglu.implementation("native_packed", **library.REQUIREMENTS, accepts=_accepts_pair)
def _swiglu_native_packed(
    x: Float[Array, "*B D"],
    gate: PackedWeight,
    up: PackedWeight,
    gate_bias: Float[Array, "F"] | None = None,
    up_bias: Float[Array, "F"] | None = None,
) -> Float[Array, "*B F"]:
    return _of_pair("verax_swiglu_panels", _swiglu_reference, x, (gate, up), (gate_bias, up_bias))
