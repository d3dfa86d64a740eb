"""Products of few rows with a weight in 8 or 4 bits for NVIDIA GPUs in Pallas, lowered to Triton.

    for each 64 rows of the weight and part of its inputs, all at once:
        for each tile of the part's inputs:
            load the values, make bfloat16 of them in registers, multiply on tensor cores
    parts are added up in jnp

So a weight is read once, as it is stored, and never written out. Scales multiply a tile's sum of 8-bit values, and
4-bit integers themselves, whose groups may be shorter than a tile. `gpu/attention.py` says why Triton compiles them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from verax.ops._dispatch import differentiated_as
from verax.ops._target import ADA, AMPERE, has_compute_capability
from verax.ops.gpu import KERNEL, pl, plgpu
from verax.ops.linear import linear
from verax.ops.quantized import INT4_ROWS, QuantizedWeight

MIN_ROWS = 16
"""Rows of a product on tensor cores."""

OUTPUTS = 64
"""Rows of the weight in a tile."""

INPUTS = 128
"""Inputs in a tile, unless a group is shorter."""

EIGHTH = 8
"""Inputs whose 4-bit codes lie in one place of the lanes: a pair of 16-bit words."""

PROGRAMS = 264
"""Programs that keep an H100's 132 multiprocessors busy, two on each."""

PARAMETERS = {"num_warps": 4, "num_stages": 4}


def tiles_of_part(size_out: int, tiles: int) -> int:
    """Tiles of inputs in a part, so that there are `PROGRAMS`."""
    return pl.cdiv(tiles, min(tiles, pl.cdiv(PROGRAMS, pl.cdiv(size_out, OUTPUTS))))


def product(x: Float[Array, "M D"], weight: QuantizedWeight, *, interpret: bool = False) -> Float[Array, "M F"]:
    """`x W^T` of a weight whose columns are in order; with `interpret` as `pallas_call` takes it."""
    (M, D), F = x.shape, weight.size_out
    x = x.astype(jnp.bfloat16)
    if weight.bits == 8:
        kernel, tile = _eight_bit_kernel, weight.group_size or INPUTS
    else:
        kernel, tile = _int4_kernel, INPUTS
        # A plane for each place within an eighth, so that inputs that meet in a product lie together.
        x = jnp.moveaxis(x.reshape(M, D // EIGHTH, EIGHTH), 2, 0)
    tiles = pl.cdiv(D, tile)
    each = tiles_of_part(F, tiles)
    parts = pl.cdiv(tiles, each)
    run = pl.pallas_call(
        partial(kernel, tile=tile, each=each, group=weight.group_size),
        grid=(pl.cdiv(F, OUTPUTS), parts),
        out_shape=jax.ShapeDtypeStruct((parts, M, F), jnp.float32),
        compiler_params=plgpu.CompilerParams(**PARAMETERS),
        interpret=interpret,
        name=f"linear_{'float' if weight.is_float else 'int'}{weight.bits}",
    )
    zeros = [] if weight.zeros is None else [weight.zeros]
    return run(x, weight.values, weight.scales, *zeros).sum(0)


def _eight_bit_kernel(x: Any, values: Any, scales: Any, *refs: Any, tile: int, each: int, group: int | None) -> None:
    *zero_points, out = refs
    M, D = x.shape
    F = values.shape[0]
    f, m = pl.program_id(0) * OUTPUTS + jnp.arange(OUTPUTS), jnp.arange(max(MIN_ROWS, pl.next_power_of_2(M)))
    first = pl.program_id(1) * each

    def load_of_rows(ref: Any, i: Any) -> Array:
        return plgpu.load(ref.at[f, i], mask=f < F, other=0).astype(jnp.float32)

    def body(i: Any, acc: Array) -> Array:
        d = i * tile + jnp.arange(tile)
        rows = plgpu.load(x.at[m[:, None], d[None]], mask=(m < M)[:, None] & (d < D)[None], other=0.0)
        there = (f < F)[:, None] & (d < D)[None]
        w = plgpu.load(values.at[f[:, None], d[None]], mask=there, other=jnp.zeros((), values.dtype))
        # By way of float32: 8-bit floats become float16 first, which Hopper turns into bfloat16 in a slower unit.
        w = w.astype(jnp.float32)
        for ref in zero_points:
            w -= load_of_rows(ref, 0 if group is None else i)[:, None]
        # bfloat16 holds the values exactly, and the differences of integers.
        update = plgpu.dot(rows, w.astype(jnp.bfloat16), trans_b=True)
        return acc + (update if group is None else update * load_of_rows(scales, i)[None])

    acc = lax.fori_loop(
        first, jnp.minimum(first + each, pl.cdiv(D, tile)), body, jnp.zeros((m.size, OUTPUTS), jnp.float32)
    )
    if group is None:
        acc *= load_of_rows(scales, 0)[None]
    plgpu.store(out.at[pl.program_id(1), m[:, None], f[None]], acc, mask=(m < M)[:, None] & (f < F)[None])


def _int4_kernel(x: Any, values: Any, scales: Any, *refs: Any, tile: int, each: int, group: int) -> None:
    *zero_points, out = refs
    _, M, eighths = x.shape
    blocks, F = values.shape[0], out.shape[2]
    f, m = pl.program_id(0) * OUTPUTS + jnp.arange(OUTPUTS), jnp.arange(max(MIN_ROWS, pl.next_power_of_2(M)))
    block, lane = (f // INT4_ROWS)[None], (f % INT4_ROWS)[None]
    first = pl.program_id(1) * each

    def body(i: Any, acc: Array) -> Array:
        e = i * (tile // EIGHTH) + jnp.arange(tile // EIGHTH)
        there = (e < eighths)[:, None] & (block < blocks)
        g = (e * EIGHTH // group)[:, None]
        scale = plgpu.load(scales.at[block, g, lane], mask=there, other=0.0).astype(jnp.float32)
        offset = jnp.full(scale.shape, 8, jnp.int32)
        for ref in zero_points:
            offset += plgpu.load(ref.at[block, g, lane], mask=there, other=0).astype(jnp.int32)
        for h in range(2):
            words = plgpu.load(values.at[block, e[:, None], 2 * lane + h], mask=there, other=0).astype(jnp.int32)
            for j in range(4):
                codes = ((words >> (4 * j)) & 15) - offset
                w = (codes.astype(jnp.float32) * scale).astype(jnp.bfloat16)
                mask = (m < M)[:, None] & (e < eighths)[None]
                rows = plgpu.load(x.at[2 * j + h, m[:, None], e[None]], mask=mask, other=0.0)
                acc += plgpu.dot(rows, w)
        return acc

    acc = lax.fori_loop(
        first,
        jnp.minimum(first + each, pl.cdiv(eighths, tile // EIGHTH)),
        body,
        jnp.zeros((m.size, OUTPUTS), jnp.float32),
    )
    plgpu.store(out.at[pl.program_id(1), m[:, None], f[None]], acc, mask=(m < M)[:, None] & (f < F)[None])


MAX_ROWS = 64
"""Most rows of x. With more of them, writing the weight out in bfloat16 costs less than its product."""


def _accepts(x: Any, weight: Any, bias: Any = None) -> bool:
    if not isinstance(weight, QuantizedWeight) or len(weight.shape) != 2:
        return False
    rows = math.prod(x.shape[:-1])
    sizes = 0 < rows <= MAX_ROWS and weight.size_in % 32 == 0
    known = has_compute_capability(*ADA) if weight.is_float else has_compute_capability(AMPERE)
    return weight.order is None and not weight.rounds_inputs and sizes and known


@linear.implementation("triton", **KERNEL, accepts=_accepts)
def _linear_triton(
    x: Float[Array, "*B D"], weight: QuantizedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    y = differentiated_as(linear.reference, product, x.reshape(-1, x.shape[-1]), weight)
    y = y.reshape(*x.shape[:-1], weight.size_out)
    return y if bias is None else y + bias.astype(jnp.float32)
