"""Native implementation of `ops.linear` for many rows: blocks of both operands are packed and multiplied in cache."""

from __future__ import annotations

import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.ops.block_quantized import BLOCK_KINDS, BlockQuantizedWeight
from verax.ops.cpu import library
from verax.ops.cpu.linear import MAX_ROWS_QUANTIZED
from verax.ops.linear import Quantized, linear
from verax.ops.packed import PackedWeight
from verax.ops.quantized import QuantizedWeight

__all__: list[str] = []

MIN_ROWS = {"float32": 12, "bfloat16": 24, "int8": MAX_ROWS_QUANTIZED + 1, "blocks": MAX_ROWS_QUANTIZED + 1}
"""Rows from which it is faster than the kernel for few rows, by dtype of the weight (`verax bench ops`). Beside int8
that is 24, but it rounds x to bfloat16 where the other keeps 16 bits: an answer should not depend on its batch."""

MIN_ROWS_AS_FLOATS = 12
"""The same beside bfloat16 on a processor that does not multiply it: 1.2 to 1.5 times faster (AVX2)."""

TOO_MANY = 512
"""Rows from which XLA's matmul library is as fast, and for some shapes faster. Quantised weights it has to write out as
bfloat16 first: for them it never is. The same goes for bfloat16 on a processor that does not multiply it: XLA writes
float32, and takes 1.2 to 1.8 times as long for 32 to 2,048 rows (AVX2)."""

TOO_MANY_FLOATS = 33
"""The same beside float32 without AVX-512."""

TILE_ROWS = range(5, 128)
"""Rows for which it is faster beside bfloat16 on a processor with AMX, which multiplies 16 of them in the time of one.
XLA's library has AMX too: for 16 to 64 rows it takes 1.2 to 1.5 times the processor time, from 128 on 0.7 to 1.4."""

DEPTH_STEP, COLUMN_STEP = 32, 16
"""Divisors of a row's inputs and of the weight's rows that the kernel requires (`GEMM_DEPTH_STEP` in native/)."""

DOT = "bf16_dot"
"""Capability of a processor that multiplies bfloat16."""

TILES = "bf16_tiles"
"""Capability of AMX."""

VECTORS = "fma"
"""Capability without which the kernel has no registers for its sums."""


def _accepts(x: Any, weight: Any, bias: Any = None) -> bool:
    kind = _kind(weight)
    return kind is not None and takes(weight) and math.prod(x.shape[:-1]) in faster_rows(kind)


def faster_rows(kind: str) -> range:
    """Numbers of rows for which it is the fastest here, beside XLA and the kernel for few rows.

    Args:
        kind: dtype of the weight, or "blocks" of GGUF files.
    """
    least, dot = MIN_ROWS[kind], library.has(DOT)
    if not library.has(VECTORS):
        return range(0)
    if kind == "float32":
        return range(least, TOO_MANY if dot else TOO_MANY_FLOATS)
    if kind == "bfloat16":
        if library.has(TILES):
            return TILE_ROWS
        return range(least, TOO_MANY) if dot else range(MIN_ROWS_AS_FLOATS, sys.maxsize)
    return range(least, sys.maxsize)


def _kind(weight: Any) -> str | None:
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
    return weight.shape[0] % COLUMN_STEP == 0 and weight.shape[1] % DEPTH_STEP == 0


@jax.custom_jvp
def _product(
    x: Float[Array, "M D"], weight: Float[Array, "F D"] | Quantized, bias: Float[Array, "F"] | None
) -> Float[Array, "M F"]:
    scales, kind = None, 0
    if isinstance(weight, QuantizedWeight):
        matrix, scales = weight.values, weight.scales[:, 0]
    elif isinstance(weight, BlockQuantizedWeight):
        matrix, kind = weight.words, BLOCK_KINDS[weight.kind].number
    else:
        matrix = weight
    x = x.astype(jnp.float32 if matrix.dtype == jnp.float32 else jnp.bfloat16)
    last = (jnp.zeros(0) if one is None else one.astype(jnp.float32) for one in (scales, bias))
    shape = x.shape[0], weight.shape[0]
    return library.call("verax_gemm", shape, x, matrix, *last, block_kind=np.int64(kind))


@_product.defjvp
def _product_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return _product(*primals), jax.jvp(linear.reference, primals, tangents)[1]


@linear.implementation("native_gemm", **library.REQUIREMENTS, accepts=_accepts)
def _linear_native_gemm(
    x: Float[Array, "*B D"], weight: Float[Array, "F D"] | Quantized, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    return _product(x.reshape(-1, x.shape[-1]), weight, bias).reshape(*x.shape[:-1], weight.shape[0])


MOST_INTEGERS = 1 << 17
"""Most inputs of a row whose products 32-bit integers hold (`GEMM_INTEGER_DEPTH` in native/)."""


def _accepts_integers(x: Any, weight: Any, bias: Any = None) -> bool:
    rounds = isinstance(weight, QuantizedWeight) and weight.rounds_inputs
    return rounds and takes(weight) and weight.shape[1] <= MOST_INTEGERS


@linear.implementation("native_integers", **library.REQUIREMENTS, accepts=_accepts_integers)
def _linear_native_integers(
    x: Float[Array, "*B D"], weight: QuantizedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    last = jnp.zeros(0) if bias is None else bias.astype(jnp.float32)
    scales = weight.scales[:, 0].astype(jnp.float32)
    y = library.call("verax_gemm_int8", (len(rows), weight.shape[0]), rows, weight.values, scales, last)
    return y.reshape(*x.shape[:-1], weight.shape[0])
