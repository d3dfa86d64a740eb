"""Norms of heads and rotary positions for NVIDIA GPUs in Pallas, lowered to Triton.

    for each token and each eight of its heads, queries or keys, all at once:
        load both halves, normalise, rotate, store

XLA makes three launches: the norm of queries, the norm of keys, and the rotation of the next kernel's inputs. A decode
step of few sequences is a chain of launches, most of which take little longer than to begin and to end.
`gpu/attention.py` says why Triton compiles it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from verax.ops._dispatch import differentiated_as
from verax.ops._target import AMPERE, has_compute_capability
from verax.ops.gpu import KERNEL, pl, plgpu
from verax.ops.rope import norm_rotary

HEADS = 8
"""Heads of a program."""


def rotated(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    *arrays: Array,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"]]:
    """`ops.norm_rotary` of one axis of tokens; `interpret` as `pallas_call` takes it."""
    run = pl.pallas_call(
        partial(_kernel, eps=eps),
        grid=(q.shape[0], sum(pl.cdiv(x.shape[1], HEADS) for x in (q, k))),
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, k)],
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="norm_rotary",
    )
    return tuple(run(q, k, *arrays))


def _kernel(
    q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, q_out: Any, k_out: Any, *, eps: float
) -> None:
    t, tile, h = pl.program_id(0), pl.program_id(1), cos.shape[-1]
    size = jnp.arange(h)

    def rotate(x: Any, weight: Any, out: Any, tile: Any) -> None:
        heads = tile * HEADS + jnp.arange(HEADS)
        places = [(t, heads[:, None], start + size[None]) for start in (0, h)]
        there = (heads < x.shape[1])[:, None]
        halves = [plgpu.load(x.at[at], mask=there, other=0.0).astype(jnp.float32) for at in places]
        mean_square = sum((half * half).sum(1) for half in halves) / (2 * h)
        factor = lax.rsqrt(mean_square + eps)[:, None]
        weights = [plgpu.load(weight.at[start + size]).astype(jnp.float32)[None] for start in (0, h)]
        x1, x2 = (half * factor * w for half, w in zip(halves, weights, strict=True))
        c, s = (plgpu.load(table.at[t, size])[None] for table in (cos, sin))
        for at, half in zip(places, (x1 * c - x2 * s, x2 * c + x1 * s), strict=True):
            plgpu.store(out.at[at], half, mask=there)

    num_q = pl.cdiv(q.shape[1], HEADS)
    pl.when(tile < num_q)(lambda: rotate(q, q_weight, q_out, tile))
    pl.when(tile >= num_q)(lambda: rotate(k, k_weight, k_out, tile - num_q))


def _accepts(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: Any) -> bool:
    h, tokens = cos.shape[-1], q.shape[:-2]
    whole = q.shape[-1] == 2 * h and h & (h - 1) == 0 and h >= 16
    known = not isinstance(eps, jax.Array)  # while tracing
    return whole and known and q.size > 0 and cos.shape[:-1] == tokens and has_compute_capability(AMPERE)


@norm_rotary.implementation("triton", **KERNEL, accepts=_accepts)
def _norm_rotary_triton(
    q: Float[Array, "*B N H"],
    k: Float[Array, "*B K H"],
    q_weight: Float[Array, "H"],
    k_weight: Float[Array, "H"],
    cos: Float[Array, "*B h"],
    sin: Float[Array, "*B h"],
    eps: float,
) -> tuple[Float[Array, "*B N H"], Float[Array, "*B K H"]]:
    def kernel(q: Array, k: Array, q_weight: Array, k_weight: Array, cos: Array, sin: Array) -> tuple[Array, ...]:
        flat = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
        tables = (table.reshape(-1, table.shape[-1]) for table in (cos, sin))
        outs = rotated(*flat, q_weight, k_weight, *tables, eps=eps)
        return tuple(out.reshape(x.shape) for out, x in zip(outs, (q, k), strict=True))

    reference = partial(norm_rotary.reference, eps=eps)
    return differentiated_as(reference, kernel, q, k, q_weight, k_weight, cos, sin)
