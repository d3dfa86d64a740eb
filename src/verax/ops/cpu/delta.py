"""C++ kernel of the delta rule's recurrence: chunks, or single tokens, with the state in the first cache levels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from verax.ops.cpu import library
from verax.ops.cpu.attention import FLOATS
from verax.ops.delta import DeltaInputs, delta_recurrence
from verax.ops.delta._chunk import chunk_backward, chunk_forward, chunk_layout

__all__: list[str] = []


@dataclass(frozen=True)
class _Options:
    scale: float
    use_qk_l2norm: bool
    erase_before_decay: bool
    chunk_size: int | None
    """Tokens between the states that are kept for the backward pass; the kernel has a chunk size of its own."""


def _accepts(x: DeltaInputs, initial_state: Any, cu_seqlens: Any = None, *, scale: Any = 1.0, **_: Any) -> bool:
    dtypes = all(a.dtype in FLOATS for a in x) and initial_state.dtype == jnp.float32
    return dtypes and not isinstance(scale, jax.Array)


@delta_recurrence.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _delta_native(
    x: DeltaInputs,
    initial_state: Float[Array, "N HV K V"],
    cu_seqlens: Int[Array, "M"] | None = None,
    *,
    scale: float = 1.0,
    use_qk_l2norm: bool = False,
    erase_before_decay: bool = False,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"]]:
    options = _Options(float(scale), use_qk_l2norm, erase_before_decay, chunk_size)
    return _run(x, initial_state, cu_seqlens, options)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _run(x: DeltaInputs, initial_state: Array, cu_seqlens: Array | None, options: _Options) -> tuple[Array, Array]:
    final, out, _ = _call(x, initial_state, cu_seqlens, options)
    return out, final


def _run_forward(
    x: DeltaInputs, initial_state: Array, cu_seqlens: Array | None, options: _Options
) -> tuple[tuple[Array, Array], tuple[DeltaInputs, Array, Array | None]]:
    result: Any = _run_keeping(x, initial_state, cu_seqlens, options)
    out, final, before = result
    return (out, final), (x, before, cu_seqlens)


def _run_backward(
    options: _Options, residuals: tuple[DeltaInputs, Array, Array | None], cotangents: tuple[Array, Array]
) -> tuple[DeltaInputs, Array, None]:
    x, before, cu_seqlens = residuals
    d_out, d_final = cotangents
    d_x, d_initial = chunk_backward(x, before, cu_seqlens, d_out, d_final, **asdict(options))
    return d_x, d_initial, None


_run.defvjp(_run_forward, _run_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _run_keeping(
    x: DeltaInputs, initial_state: Array, cu_seqlens: Array | None, options: _Options
) -> tuple[Array, Array, Array]:
    """`chunk_forward`: outputs, final states, and those before each chunk."""
    layout = chunk_layout(x.v.shape[0], x.v.shape[1], cu_seqlens, options.chunk_size)
    final, out, before = _call(x, initial_state, cu_seqlens, options, layout.chunks, layout.size)
    return out, final, before


def _keeping_forward(
    x: DeltaInputs, initial_state: Array, cu_seqlens: Array | None, options: _Options
) -> tuple[Any, Any]:
    # Only where a gradient is differentiated again.
    return jax.vjp(lambda x, state: chunk_forward(x, state, cu_seqlens, **asdict(options)), x, initial_state)


def _keeping_backward(options: _Options, pull: Any, cotangents: tuple[Array, ...]) -> tuple[DeltaInputs, Array, None]:
    d_x, d_initial = pull(cotangents)
    return d_x, d_initial, None


_run_keeping.defvjp(_keeping_forward, _keeping_backward)


def _call(
    x: DeltaInputs,
    initial_state: Array,
    cu_seqlens: Array | None,
    options: _Options,
    chunks: int = 0,
    keep_every: int = 0,
) -> tuple[Array, Array, Array]:
    """Results of the kernel: final states, outputs, and the states before every `keep_every` tokens, if it is not 0."""
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
        scale=np.float32(options.scale),
        normalize=options.use_qk_l2norm,
        erase_before_decay=options.erase_before_decay,
        keep_every=np.int64(keep_every),
    )
    return final, out, before
