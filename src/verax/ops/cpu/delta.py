"""C++ kernels of the delta rule's recurrence and of LAM's published rules: chunks, or single tokens, with the states in
the first cache levels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import differentiated_as, replaced_by
from verax.ops.cpu import library
from verax.ops.cpu.attention import FLOATS
from verax.ops.delta import DeltaInputs, delta_recurrence
from verax.ops.delta._chunk import chunk_backward, chunk_forward, chunk_layout
from verax.ops.delta._inputs import RecurrenceOptions
from verax.ops.hierarchical._inputs import HierarchicalInputs, Pair, chunk_length
from verax.ops.hierarchical._published import hierarchical_factored, hierarchical_rule, local_outputs, local_rule


def _accepts(x: DeltaInputs, initial_state: Any, cu_seqlens: Any = None, *, scale: Any = 1.0, **_: Any) -> bool:
    dtypes = all(a.dtype in FLOATS for a in x) and initial_state.dtype == jnp.float32
    return dtypes and not isinstance(scale, jax.Array)


@delta_recurrence.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _delta_native(
    x: DeltaInputs,
    initial_state: Float[Array, "N HV K V"],
    cu_seqlens: Int[Array, "M"] | None = None,
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"]]:
    return _run(x, initial_state, cu_seqlens, tuple(sorted(options.items())))


_Options = tuple[tuple[str, Any], ...]
"""`RecurrenceOptions` as names and values, which can be hashed. The kernel has a chunk size of its own: `chunk_size` is
the number of tokens between the states that are kept for the backward pass."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _run(x: DeltaInputs, initial_state: Array, cu_seqlens: Array | None, options: _Options) -> tuple[Array, Array]:
    final, out, _ = _call(x, initial_state, cu_seqlens, options)
    return out, final


def _run_forward(
    x: DeltaInputs, initial_state: Array, cu_seqlens: Array | None, options: _Options
) -> tuple[tuple[Array, Array], tuple[DeltaInputs, Array, Array | None]]:
    def kernel(x: DeltaInputs, initial_state: Array, cu_seqlens: Array | None) -> tuple[Array, Array, Array]:
        layout = chunk_layout(x, cu_seqlens, dict(options).get("chunk_size"))
        final, out, before = _call(x, initial_state, cu_seqlens, options, layout.chunks, layout.size)
        return out, final, before

    # The chunked implementation takes its place only where a gradient is differentiated again.
    chunked = partial(chunk_forward, **dict(options))
    out, final, before = replaced_by(chunked, kernel, x, initial_state, cu_seqlens)
    return (out, final), (x, before, cu_seqlens)


def _run_backward(
    options: _Options, residuals: tuple[DeltaInputs, Array, Array | None], cotangents: tuple[Array, Array]
) -> tuple[DeltaInputs, Array, None]:
    x, before, cu_seqlens = residuals
    d_out, d_final = cotangents
    d_x, d_initial = chunk_backward(x, before, cu_seqlens, d_out, d_final, **dict(options))
    return d_x, d_initial, None


_run.defvjp(_run_forward, _run_backward)


def _call(
    x: DeltaInputs,
    initial_state: Array,
    cu_seqlens: Array | None,
    options: _Options,
    chunks: int = 0,
    keep_every: int = 0,
) -> tuple[Array, Array, Array]:
    """Results of the kernel: final states, outputs, and the states before every `keep_every` tokens, if it is not 0."""
    given = dict(options)
    dtype = x.v.dtype if len({a.dtype for a in x[:4]}) == 1 else jnp.float32
    kept = (chunks, x.v.shape[0], *initial_state.shape[1:]) if keep_every else (0,)
    final, out, before = library.call_many(
        "verax_delta",
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (initial_state.shape, x.v.shape, kept)],
        initial_state,
        *(a.astype(dtype) for a in x[:4]),
        *(a.astype(jnp.float32) for a in x[4:]),
        jnp.zeros(0, jnp.int32) if cu_seqlens is None else cu_seqlens.astype(jnp.int32),
        changed=1,
        scale=np.float32(given.get("scale", 1.0)),
        normalize=given.get("use_qk_l2norm", False),
        erase_before_decay=given.get("erase_before_decay", False),
        keep_every=np.int64(keep_every),
    )
    return final, out, before


def _accepts_hierarchical(x: HierarchicalInputs, *, output_final_state: bool = False, **_: Any) -> bool:
    return x.q.size > 0 and x.q.dtype in (jnp.float32, jnp.bfloat16) and not output_final_state


@hierarchical_rule.implementation("native", **library.REQUIREMENTS, accepts=_accepts_hierarchical)
def _hierarchical_native(x: HierarchicalInputs, *, chunk_size: int) -> tuple[Float[Array, "B T H V"], Pair]:
    size = chunk_length(x.q.shape[1], chunk_size)

    def kernel(x: HierarchicalInputs) -> tuple[Array, Pair]:
        B, _, H, K = x.q.shape
        state = (B, H, K, x.v.shape[3])
        results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.v.shape, state, state)]
        weights = x.flux.bilinear, x.flux.temperature, *x.flux.chunk, *x.flux.token
        arrays = x.q, x.k, x.v, x.beta, *x.gates, *x.decays, *weights
        out, fast, slow = library.call_many("verax_hierarchical", results, *arrays, chunk=np.int64(size))
        return out, (fast, slow)

    return differentiated_as(partial(hierarchical_factored, chunk_size=size), kernel, _floats(x))


@local_rule.implementation("native", **library.REQUIREMENTS, accepts=_accepts_hierarchical)
def _local_native(
    x: HierarchicalInputs, *, chunk_size: int, output_final_state: bool = False
) -> tuple[Float[Array, "B T H V"], None]:
    size = chunk_length(x.q.shape[1], chunk_size)

    def kernel(x: HierarchicalInputs) -> Array:
        # Neither decays nor flux play a part in the outputs.
        return library.call("verax_hierarchical_local", x.v.shape, *x[:4], *x.gates, chunk=np.int64(size))

    return differentiated_as(lambda x: local_outputs(x.chunks(size)), kernel, _floats(x)), None


def _floats(x: HierarchicalInputs) -> HierarchicalInputs:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), x)
