"""C++ kernels of LAM's published rules: a chunk at a time in the caches, each head's states by a pipelined scan."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.ops.cpu import library
from verax.ops.hierarchical import ResonanceFlux, hierarchical_delta_rule, local_delta_rule
from verax.ops.hierarchical._chunks import Pair, check, chunk_length, cut
from verax.ops.hierarchical._factored import hierarchical_factored, local_outputs

__all__: list[str] = []


def _accepts(q: Any, *_: Any, output_final_state: bool = False, **__: Any) -> bool:
    fits = q.ndim == 4 and q.size > 0 and q.dtype in (jnp.float32, jnp.bfloat16) and not output_final_state
    return fits


@hierarchical_delta_rule.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
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
    return _hierarchical(*_floats((q, k, v, beta, decays, gates, flux)), chunk_length(q.shape[1], chunk_size))


@local_delta_rule.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
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
    # Neither decays nor flux play a part in its outputs.
    return _local(*_floats((q, k, v, beta, gates)), chunk_length(q.shape[1], chunk_size)), None


def _floats(arrays: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), arrays)


# The derivative of each kernel is that of the plain expressions which it stands for.
@partial(jax.custom_jvp, nondiff_argnums=(7,))
def _hierarchical(
    q: Array, k: Array, v: Array, beta: Array, decays: Pair, gates: Pair, flux: ResonanceFlux, size: int
) -> tuple[Array, Pair]:
    B, _, H, K = q.shape
    state = (B, H, K, v.shape[3])
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (v.shape, state, state)]
    weights = flux.bilinear, flux.temperature, *flux.chunk, *flux.token
    arrays = q, k, v, beta, *gates, *decays, *weights
    out, fast, slow = library.call_many("verax_hierarchical", results, *arrays, chunk=np.int64(size))
    return out, (fast, slow)


@_hierarchical.defjvp
def _hierarchical_jvp(size: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    reference = partial(hierarchical_factored, chunk_size=size)
    return _hierarchical(*primals, size), jax.jvp(reference, primals, tangents)[1]


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def _local(q: Array, k: Array, v: Array, beta: Array, gates: Pair, size: int) -> Array:
    return library.call("verax_hierarchical_local", v.shape, q, k, v, beta, *gates, chunk=np.int64(size))


@_local.defjvp
def _local_jvp(size: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    def reference(q: Array, k: Array, v: Array, beta: Array, gates: Pair) -> Array:
        return local_outputs(cut(q, k, v, beta, gates, gates, size))  # the decays play no part

    return _local(*primals, size), jax.jvp(reference, primals, tangents)[1]
