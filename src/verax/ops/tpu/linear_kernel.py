"""Products of few rows with 8-bit integers that have a scale for each group of inputs, for TPUs in Pallas.

    for each tile of the weight's rows:
        for each 128 inputs:
            widen the tile's integers in registers, multiply, scale the sums of each group and add them up

So a weight is read once, as it is stored, and never written out. Groups of 32 or 64 inputs share a product: the rows of
x are multiplied once for each of them, with the other groups' inputs cleared, which takes the matrix unit no longer
than to take the weight up. Sums are scaled in float32, so that scales are exact. Rows and inputs past the end of the
weight are never padded: they meet zeros in x and in the scales, or are cut off from the result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from verax.ops.quantized import QuantizedWeight
from verax.ops.tpu.products import product

__all__ = ["LANES", "SUBLANES", "grouped_product"]

LANES, SUBLANES = 128, 16
"""Size of a register of 16-bit numbers."""

MAX_CHUNK = 8 * LANES
"""Most inputs in a turn of the loop."""

MAX_TILE = 512
"""Most rows of the weight in a tile."""

BUFFER = 1 << 20
"""Bytes of a tile, if 128 rows have no more. Two of them are in vector memory."""


def grouped_product(x: Float[Array, "M D"], weight: QuantizedWeight, *, interpret: Any = False) -> Float[Array, "M F"]:
    """`x W^T` of a weight of 8-bit integers in groups, whose columns are in order.

    Args:
        x: few rows, which are rounded to bfloat16.
        weight: the weight. Its zero points are subtracted after the product, from the sums of each group.
        interpret: as `pallas_call` takes it.
    """
    (M, D), F, group = x.shape, weight.size_out, weight.group_size
    assert group is not None
    chunk = _whole(pl.cdiv(D, pl.cdiv(D, MAX_CHUNK)), LANES)
    columns, rows = _whole(D, chunk), _whole(M, SUBLANES)
    tile = min(max(BUFFER // columns // LANES * LANES, LANES), MAX_TILE, _whole(F, LANES))
    rounded = x.astype(jnp.bfloat16)
    scales = weight.scales.astype(jnp.float32)
    by_chunk = jnp.pad(scales.T, ((0, columns // group - D // group), (0, 0))).reshape(-1, chunk // group, F)
    inputs = _split_groups(jnp.pad(rounded, ((0, rows - M), (0, columns - D))), LANES // group)
    run = pl.pallas_call(
        partial(_kernel, chunk=chunk),
        out_shape=jax.ShapeDtypeStruct((rows, F), jnp.float32),
        grid=(pl.cdiv(F, tile),),
        in_specs=[
            pl.BlockSpec(inputs.shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1)),  # the same in all steps
            pl.BlockSpec((tile, columns), lambda i: (i, 0)),
            pl.BlockSpec((*by_chunk.shape[:2], tile), lambda i: (0, 0, i)),
        ],
        out_specs=pl.BlockSpec((rows, tile), lambda i: (0, i)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * M * D * F, transcendentals=0, bytes_accessed=weight.nbytes + 4 * M * (D + F)
        ),
        interpret=interpret,
        name="linear_int8",
    )
    y = run(inputs, weight.values, by_chunk)[:M]
    if weight.zeros is None:
        return y
    sums = rounded.astype(jnp.float32).reshape(M, -1, group).sum(-1)
    return y - product(sums, scales * weight.zeros.astype(jnp.float32), (1, 1))


def _whole(size: int, step: int) -> int:
    """Smallest multiple of a step that has room for a size."""
    return pl.cdiv(size, step) * step


def _split_groups(x: Float[Array, "M D"], groups: int) -> Float[Array, "R D"]:
    """Rows once for each of the groups in 128 inputs, with the inputs of the other groups cleared."""
    if groups == 1:
        return x
    own = jnp.arange(x.shape[1]) * groups // LANES % groups == jnp.arange(groups)[:, None]
    return jnp.where(own[:, None], x, 0).reshape(-1, x.shape[1])


def _kernel(x: Any, values: Any, scales: Any, out: Any, *, chunk: int) -> None:
    rows = out.shape[0]
    groups = x.shape[0] // rows

    def add_chunk(i: Any, sums: Array) -> Array:
        for j in range(chunk // LANES):
            at = pl.ds(pl.multiple_of(i * chunk + j * LANES, LANES), LANES)
            unscaled = product(x[:, at], values[:, at].astype(jnp.bfloat16), (1, 1))
            for g in range(groups):
                sums += unscaled[g * rows : (g + 1) * rows] * scales[i, pl.ds(j * groups + g, 1)]
        return sums

    out[...] = lax.fori_loop(0, scales.shape[0], add_chunk, jnp.zeros(out.shape, jnp.float32))
