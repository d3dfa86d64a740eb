"""Products of few rows with several weights for NVIDIA GPUs in Pallas, lowered to Triton.

    for each 32 rows of one of the weights (of both, for SwiGLU), all at once:
        for each tile of the inputs: load, multiply on tensor cores

So several weights of a few megabytes are one launch, in which all multiprocessors read: alone, each product takes
longer to begin and to end than to read its weight. On an H100 a decode step of Qwen3-0.6B takes 5.6 us for queries,
keys and values in place of 9.0, and 6.7 us for SwiGLU in place of 12. `gpu/attention.py` says why Triton compiles them.

There are none for weights in 8 or 4 bits: XLA widens them within its own products, and was as fast on an H100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax.ops._dispatch import differentiated_as
from verax.ops._target import AMPERE, has_compute_capability
from verax.ops.gpu import KERNEL, pl, plgpu
from verax.ops.linear import multi_linear, swiglu

ROWS = 16
"""Most rows of x: as many as one product on tensor cores has. Fewer rows are filled up with zeros."""

OUTPUTS, INPUTS = 32, 128
"""Rows of a weight in a program, and inputs that it loads at a time."""

PARAMETERS = {"num_warps": 4, "num_stages": 4}


def joined_products(
    x: Float[Array, "M D"],
    weights: Sequence[Float[Array, "_ D"]],
    dtypes: Sequence[DTypeLike],
    *,
    gated: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "M _"], ...]:
    """`x W^T` of each weight in its dtype; if `gated`, `silu(x W^T) * (x V^T)` of a pair of weights alone."""
    sizes = [weight.shape[0] for weight in weights[: len(dtypes)]]
    run = pl.pallas_call(
        _gated_kernel if gated else _joined_kernel,
        grid=(sum(pl.cdiv(size, OUTPUTS) for size in sizes),),
        out_shape=[jax.ShapeDtypeStruct((x.shape[0], size), dtype) for size, dtype in zip(sizes, dtypes, strict=True)],
        compiler_params=plgpu.CompilerParams(**PARAMETERS),
        interpret=interpret,
        name="swiglu" if gated else "multi_linear",
    )
    return tuple(run(x.astype(weights[0].dtype), *weights))


def _joined_kernel(x: Any, *refs: Any) -> None:
    tile, first, count = pl.program_id(0), 0, len(refs) // 2
    for weight, out in zip(refs[:count], refs[count:], strict=True):
        tiles = pl.cdiv(weight.shape[0], OUTPUTS)

        @pl.when((tile >= first) & (tile < first + tiles))
        def _(weight: Any = weight, out: Any = out, at: Any = tile - first) -> None:
            (sums,) = _products_of_tile(x, [weight], at)
            _store_tile(out, at, sums)

        first += tiles


def _gated_kernel(x: Any, gate: Any, up: Any, out: Any) -> None:
    gated, y = _products_of_tile(x, [gate, up], pl.program_id(0))
    _store_tile(out, pl.program_id(0), gated / (1 + jnp.exp(-gated)) * y)


def _products_of_tile(x: Any, weights: Sequence[Any], at: Any) -> list[Array]:
    """Products of the rows of x with these rows of each weight, `[m, OUTPUTS]`."""
    M, D = x.shape
    f, m = at * OUTPUTS + jnp.arange(OUTPUTS), jnp.arange(ROWS)

    def body(i: Any, sums: list[Array]) -> list[Array]:
        d = i * INPUTS + jnp.arange(INPUTS)
        rows = plgpu.load(x.at[m[:, None], d[None]], mask=(m < M)[:, None] & (d < D)[None], other=0.0)
        there = (f < weights[0].shape[0])[:, None] & (d < D)[None]
        loaded = [plgpu.load(weight.at[f[:, None], d[None]], mask=there, other=0.0) for weight in weights]
        return [one + plgpu.dot(rows, w, trans_b=True) for one, w in zip(sums, loaded, strict=True)]

    zeros = [jnp.zeros((ROWS, OUTPUTS), jnp.float32) for _ in weights]
    return lax.fori_loop(0, pl.cdiv(D, INPUTS), body, zeros)


def _store_tile(out: Any, at: Any, values: Array) -> None:
    (M, F), m = out.shape, jnp.arange(ROWS)
    f = at * OUTPUTS + jnp.arange(OUTPUTS)
    mask = (m < M)[:, None] & (f < F)[None]
    plgpu.store(out.at[m[:, None], f[None]], values.astype(out.dtype), mask=mask)


def _accepts_several(x: Any, weights: Sequence[Any], biases: Any = None, dtypes: Any = None) -> bool:
    plain = all(isinstance(weight, jax.Array | jax.ShapeDtypeStruct) for weight in weights)
    few = x.size > 0 and math.prod(x.shape[:-1]) <= ROWS
    unbiased = biases is None or all(bias is None for bias in biases)
    halves = plain and all(weight.dtype in (jnp.bfloat16, jnp.float16) for weight in weights)
    alike = plain and len({weight.dtype for weight in weights}) == 1
    return halves and few and unbiased and alike and has_compute_capability(AMPERE)


@multi_linear.implementation("triton", **KERNEL, accepts=_accepts_several)
def _multi_linear_triton(
    x: Float[Array, "*B D"],
    weights: Sequence[Float[Array, "_ D"]],
    biases: Any = None,
    dtypes: Sequence[DTypeLike] | None = None,
) -> tuple[Array, ...]:
    dtypes = tuple(dtypes or [jnp.float32] * len(weights))
    reference = lambda x, *weights: multi_linear.reference(x, weights, None, dtypes)
    kernel = lambda x, *weights: joined_products(x, weights, dtypes)
    ys = differentiated_as(reference, kernel, x.reshape(-1, x.shape[-1]), *weights)
    return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)


def _accepts_swiglu(x: Any, gate: Any, up: Any, gate_bias: Any = None, up_bias: Any = None) -> bool:
    return _accepts_several(x, (gate, up), (gate_bias, up_bias))


@swiglu.implementation("triton", **KERNEL, accepts=_accepts_swiglu)
def _swiglu_triton(
    x: Float[Array, "*B D"],
    gate: Float[Array, "F D"],
    up: Float[Array, "F D"],
    gate_bias: None = None,
    up_bias: None = None,
) -> Float[Array, "*B F"]:
    kernel = lambda x, *weights: joined_products(x, weights, [jnp.float32], gated=True)[0]
    y = differentiated_as(swiglu.reference, kernel, x.reshape(-1, x.shape[-1]), gate, up)
    return y.reshape(*x.shape[:-1], -1)
