"""Native forms of LAM's published rules: what a chunk's tokens make without the state, and what they read from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.ops.cpu import library
from verax.ops.hierarchical import ResonanceFlux, hierarchical_delta_rule, local_delta_rule
from verax.ops.hierarchical._chunks import Chunks, Pair, check, chunk_length, cut, tokens_by_chunk
from verax.ops.hierarchical._factored import Within, local_outputs, read, walk, within

__all__: list[str] = []


def _accepts(q: Any, *_: Any, output_final_state: bool = False, **__: Any) -> bool:
    # One device: a mesh divides matmuls over its devices, but not a kernel that it knows nothing about.
    fits = q.ndim == 4 and q.size > 0 and q.dtype in (jnp.float32, jnp.bfloat16) and not output_final_state
    return fits and jax.device_count() == 1 and library.available()


@hierarchical_delta_rule.form("native", platforms=("cpu",), accepts=_accepts)
def _hierarchical_native(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    decays: Pair,
    gates: Pair,
    flux: ResonanceFlux,
    *,
    chunk_size: int = 64,
) -> tuple[Float[Array, "B T H V"], Pair]:
    check(q, k, v, beta, decays, gates)
    size = chunk_length(q.shape[1], chunk_size)
    flux = _floats(flux)
    chunks = Within(*_within(*_floats((q, k, v, beta)), *_floats(gates), flux, size))
    fast, slow = (tokens_by_chunk(decay, size) for decay in _floats(decays))
    found, states = walk(chunks, (fast, slow), flux)
    return _read(chunks.inner, chunks.shares, found), states


@local_delta_rule.form("native", platforms=("cpu",), accepts=_accepts)
def _local_native(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    decays: Pair,
    gates: Pair,
    flux: ResonanceFlux,
    *,
    chunk_size: int = 128,
    output_final_state: bool = False,
) -> tuple[Float[Array, "B T H V"], None]:
    check(q, k, v, beta, decays, gates)
    return _local(*_floats((q, k, v, beta)), *_floats(gates), chunk_length(q.shape[1], chunk_size)), None


def _floats(arrays: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), arrays)


def _call(shapes: list[tuple[int, ...]], arrays: tuple[Array, ...], size: int, local: bool) -> Sequence[Array]:
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return library.call_many("verax_hierarchical", results, *arrays, chunk=np.int64(size), local=local)


def _chunks(q: Array, k: Array, v: Array, beta: Array, fast: Array, slow: Array, size: int) -> Chunks:
    # The decays play no part in what is taken from it.
    return cut(q, k, v, beta, (beta, beta), (fast, slow), size)


# For each kernel the derivative is that of the plain expressions which it stands for.
@partial(jax.custom_jvp, nondiff_argnums=(7,))
def _within(
    q: Array, k: Array, v: Array, beta: Array, fast: Array, slow: Array, flux: ResonanceFlux, size: int
) -> tuple[Array, ...]:
    B, T, H, K = q.shape
    V, chunks = v.shape[3], (B, T // size, H)
    shapes = [(0,), (*chunks, size, V + K), (*chunks, size, 2), (*chunks, K, V + K), (*chunks, K + V)]
    return tuple(_call(shapes, (q, k, v, beta, fast, slow, *flux.token), size, False)[1:])


@_within.defjvp
def _within_jvp(size: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    def plain(*arrays: Any) -> tuple[Array, ...]:
        return tuple(within(_chunks(*arrays[:6], size=size), arrays[6]))

    return _within(*primals, size), jax.jvp(plain, primals, tangents)[1]


@partial(jax.custom_jvp, nondiff_argnums=(6,))
def _local(q: Array, k: Array, v: Array, beta: Array, fast: Array, slow: Array, size: int) -> Array:
    without = [jnp.zeros(s, jnp.float32) for s in ((0, k.shape[3] + v.shape[3]), (0,), (1, 0), (1,))]
    return _call([v.shape, (0,), (0,), (0,), (0,)], (q, k, v, beta, fast, slow, *without), size, True)[0]


@_local.defjvp
def _local_jvp(size: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    def plain(*arrays: Array) -> Array:
        return local_outputs(_chunks(*arrays, size=size))

    return _local(*primals, size), jax.jvp(plain, primals, tangents)[1]


@jax.custom_jvp
def _read(inner: Array, shares: Array, found: Array) -> Array:
    B, n, H, C, _ = inner.shape
    return library.call("verax_hierarchical_read", (B, n * C, H, found.shape[-1]), inner, shares, found)


@_read.defjvp
def _read_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    return _read(*primals), jax.jvp(read, primals, tangents)[1]
