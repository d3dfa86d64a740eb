"""C++ kernels of LAM's published rules: a chunk at a time in the caches, each head's states by a pipelined scan."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.ops.cpu import library
from verax.ops.hierarchical._chunks import HierarchicalInputs, Pair, chunk_length
from verax.ops.hierarchical._factored import hierarchical_factored, local_outputs
from verax.ops.hierarchical._published import hierarchical_rule, local_rule

__all__: list[str] = []


def _accepts(x: HierarchicalInputs, *, output_final_state: bool = False, **_: Any) -> bool:
    return x.q.size > 0 and x.q.dtype in (jnp.float32, jnp.bfloat16) and not output_final_state


@hierarchical_rule.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _hierarchical_native(x: HierarchicalInputs, *, chunk_size: int) -> tuple[Float[Array, "B T H V"], Pair]:
    return _hierarchical(_floats(x), chunk_length(x.q.shape[1], chunk_size))


@local_rule.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _local_native(
    x: HierarchicalInputs, *, chunk_size: int, output_final_state: bool = False
) -> tuple[Float[Array, "B T H V"], None]:
    return _local(_floats(x), chunk_length(x.q.shape[1], chunk_size)), None


def _floats(x: HierarchicalInputs) -> HierarchicalInputs:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), x)


# The derivative of each kernel is that of the plain expressions which it stands for.
@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _hierarchical(x: HierarchicalInputs, size: int) -> tuple[Array, Pair]:
    B, _, H, K = x.q.shape
    state = (B, H, K, x.v.shape[3])
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.v.shape, state, state)]
    weights = x.flux.bilinear, x.flux.temperature, *x.flux.chunk, *x.flux.token
    arrays = x.q, x.k, x.v, x.beta, *x.gates, *x.decays, *weights
    out, fast, slow = library.call_many("verax_hierarchical", results, *arrays, chunk=np.int64(size))
    return out, (fast, slow)


@_hierarchical.defjvp
def _hierarchical_jvp(size: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    reference = partial(hierarchical_factored, chunk_size=size)
    return _hierarchical(*primals, size), jax.jvp(reference, primals, tangents)[1]


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _local(x: HierarchicalInputs, size: int) -> Array:
    # Neither decays nor flux play a part in the outputs.
    return library.call("verax_hierarchical_local", x.v.shape, *x[:4], *x.gates, chunk=np.int64(size))


@_local.defjvp
def _local_jvp(size: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    def reference(x: HierarchicalInputs) -> Array:
        return local_outputs(x.chunks(size))

    return _local(*primals, size), jax.jvp(reference, primals, tangents)[1]
