"""The family by name: each rule is a choice of what `DeltaInputs`' recurrence reads, erases, writes and forgets.

Arguments and conventions follow flash-linear-attention (fla-org/flash-linear-attention, `fla/ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from verax.errors import InvalidParameterError
from verax.ops._dispatch import check_axes, check_count, check_shapes, vary_alike
from verax.ops.delta._chunk import SMALLEST_CHUNK
from verax.ops.delta._inputs import (
    DeltaInputs,
    StateSlots,
    interleave,
    l2_normalize,
    packed_offsets,
)
from verax.ops.delta._recurrence import delta_recurrence, delta_slot_recurrence

IMPLEMENTATIONS = {"recurrent": "reference", "chunk": "chunk", "step": "step"}


class DeltaOptions(TypedDict, total=False):
    """Keyword arguments of every rule.

    scale: factor on q; `K ** -0.5` if None.
    initial_state: `[N, HV, K, V]`, a state for each sequence; zeros if None. N is B, or `len(cu_seqlens) - 1`.
    output_final_state: whether to return the final states as well, in float32.
    slots: where the sequences' states lie in an `initial_state` `[slots, HV, K, V]` of all slots. The final states are
        the states of all slots then. With `mode="auto"` only.
    cu_seqlens: `[N + 1]` ascending offsets from 0, for N sequences packed along T of a batch of one. With an array of
        JAX, one compiled call serves all packings; it is not checked. Tokens past the last offset give zeros.
    use_qk_l2norm: normalise q and k (and comba's p) first: `x / sqrt(sum(x^2) + 1e-6)`.
    mode: `"recurrent"` (token by token, the definition), `"chunk"` (matmuls; the one with a gradient made for it),
        `"step"` (decode, T = 1), or `"auto"`: the fastest that takes the call.
    chunk_size: of `"chunk"`, a power of two from 16; the platform's best if None. The result does not depend on it.
    """

    scale: float | None
    initial_state: Float[Array, "N HV K V"] | None
    output_final_state: bool
    slots: StateSlots | None
    cu_seqlens: Int[Array, "M"] | None
    use_qk_l2norm: bool
    mode: Literal["auto", "recurrent", "chunk", "step"]
    chunk_size: int | None


def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    beta: Float[Array, "B T HV"] | None = None,
    **options: Unpack[DeltaOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"] | None]:
    """`S <- (I - beta k k^T) S + beta k v^T; o = scale S^T q` (Yang et al., 2024, arXiv:2406.06484).

    Args:
        q, k: queries and keys.
        v: values, with a multiple HV of the H key heads: value head h reads key head `h // (HV / H)`.
        beta: how much of the old value is replaced, 0 to 1 (to 2 for negative eigenvalues); ones if None.
        options: see `DeltaOptions`.

    Returns:
        Outputs, and final states `[N, HV, K, V]` or None. Float32 whatever the inputs are (float64 if q is), as is
        everything in between.

    Raises:
        InvalidParameterError: for arguments that do not fit each other; the message begins with the argument's name.
    """
    return _run(q, k, k, v, beta, None, **options)


def gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"] | None = None,
    beta: Float[Array, "B T HV"] | None = None,
    **options: Unpack[DeltaOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"] | None]:
    """`S <- e^g (I - beta k k^T) S + beta k v^T; o = scale S^T q` (Yang et al., 2024, arXiv:2412.06464).

    Args:
        q, k, v, beta, options: as in `delta_rule`.
        g: log decays, at most 0; zeros if None.

    Returns:
        As `delta_rule`, which raises the same errors.
    """
    check_shapes(g=(g, v.shape[:3]))
    return _run(q, k, k, v, beta, g, **options)


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"] | None = None,
    **options: Unpack[DeltaOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"] | None]:
    """Kimi delta attention: `S <- (I - beta k k^T) Diag(e^g) S + beta k v^T` (Kimi team, 2025, arXiv:2510.26692).

    Args:
        q, k, v, beta, options: as in `delta_rule`.
        g: log decays by key channel, at most 0.

    Returns:
        As `delta_rule`, which raises the same errors.
    """
    check_shapes(g=(g, (*v.shape[:3], k.shape[-1])))
    return _run(q, k, k, v, beta, g, **options)


def gated_delta_product(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S HV V"],
    g: Float[Array, "B T HV"] | None,
    beta: Float[Array, "B S HV"] | None,
    num_householder: int,
    **options: Unpack[DeltaOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"] | None]:
    """One decay, then `num_householder` delta steps a token (Siems et al., 2025, arXiv:2502.10297).

    Args:
        q, g, options: as in `gated_delta_rule`, one a token; `cu_seqlens` counts tokens, `chunk_size` steps.
        k, v, beta: one a step: `S = T num_householder`, the steps of a token next to each other.
        num_householder: steps a token.

    Returns:
        As `delta_rule`, which raises the same errors. Steps are tokens to the engine: work grows with S.
    """
    n = num_householder
    check_count(num_householder=n)
    check_axes(q=q, k=k, v=v)
    B, T, H, K = q.shape
    check_shapes(k=(k, (B, T * n, H, K)), v=(v, (B, T * n, *v.shape[2:])), g=(g, (B, T, v.shape[2])))
    nothing = [jnp.zeros_like(q)] * (n - 1)
    if g is not None:
        g = interleave(g, *[jnp.zeros_like(g)] * (n - 1))
    return _run(interleave(*nothing, q), k, k, v, beta, g, steps=n, **options)


def comba(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    p: Float[Array, "B T H K"] | None = None,
    g: Float[Array, "B T HV"] | None = None,
    beta: Float[Array, "B T HV"] | None = None,
    **options: Unpack[DeltaOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"] | None]:
    """`S <- e^g S + beta k (v - S^T p)^T; o = scale S^T q`, S^T p before the decay (Hu et al., 2025, arXiv:2506.02475).

    Args:
        q, k, v, g, beta, options: as in `gated_delta_rule`.
        p: keys that read what is to be replaced; k if None.

    Returns:
        As `delta_rule`, which raises the same errors.
    """
    check_shapes(p=(p, k.shape), g=(g, v.shape[:3]))
    return _run(q, k if p is None else p, k, v, beta, g, erase_before_decay=True, **options)


def dplr_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    a: Float[Array, "B T H K"],
    b: Float[Array, "B T H K"],
    gk: Float[Array, "B T H K"] | None = None,
    **options: Unpack[DeltaOptions],
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"] | None]:
    """Diagonal plus low rank: `S <- (Diag(e^gk) + b a^T) S + k v^T; o = scale S^T q`.

    With q = r, a = -kk, b = kk a, gk = log w and scale 1 it is RWKV-7 (Peng et al., 2025, arXiv:2503.14456); without
    gk, flash-linear-attention's `iplr`.

    Args:
        q, k, v: as in `delta_rule`, with as many value heads as key heads.
        a, b: the low-rank part: b writes what a reads of the state before the decay.
        gk: log decays by key channel, at most 0; zeros if None.
        options: as in `delta_rule`; `use_qk_l2norm` leaves a and b alone.

    Returns:
        As `delta_rule`, which raises the same errors. A token is two steps to the engine: it erases with one key and
        writes with another.
    """
    check_axes(q=q, k=k, v=v)
    B, T, H, _ = k.shape
    check_shapes(q=(q, k.shape), v=(v, (B, T, H, v.shape[3])), a=(a, k.shape), b=(b, k.shape), gk=(gk, k.shape))
    if options.get("use_qk_l2norm"):
        q, k = l2_normalize(q), l2_normalize(k)
        options["use_qk_l2norm"] = False
    nothing = jnp.zeros_like(k)
    g = None if gk is None else interleave(gk, jnp.zeros_like(gk))
    return _run(
        interleave(nothing, q),
        interleave(-a, nothing),
        interleave(b, k),
        interleave(jnp.zeros_like(v), v),
        None,
        g,
        erase_before_decay=True,
        steps=2,
        **options,
    )


def _run(
    q: Float[Array, "B T H K"],
    erase: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    beta: Float[Array, "B T HV"] | None,
    g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
    *,
    erase_before_decay: bool = False,
    steps: int = 1,
    scale: float | None = None,
    initial_state: Float[Array, "N HV K V"] | None = None,
    output_final_state: bool = False,
    slots: StateSlots | None = None,
    cu_seqlens: Int[Array, "M"] | None = None,
    use_qk_l2norm: bool = False,
    mode: Literal["auto", "recurrent", "chunk", "step"] = "auto",
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B tokens HV V"], Float[Array, "N HV K V"] | None]:
    """Check what the rules have in common, fill in what was left out, run; `steps` of T make one token."""
    check_axes(q=q, k=k, v=v)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if H == 0 or HV % H:
        raise InvalidParameterError(f"v: expected a multiple of the {H} heads of q and k, got {HV} heads")
    offsets = packed_offsets(cu_seqlens, B, T // steps)
    N = B if offsets is None else offsets.shape[0] - 1
    if slots is not None and (initial_state is None or mode != "auto"):
        raise InvalidParameterError("slots: expected initial_state with them, the states of all slots, and mode auto")
    slots = None if slots is None else slots.ready(N)
    states = N if slots is None or initial_state is None else initial_state.shape[0]
    check_shapes(
        k=(k, q.shape),
        v=(v, (B, T, HV, V)),
        beta=(beta, (B, T, HV)),
        initial_state=(initial_state, (states, HV, K, V)),
    )
    if mode not in ("auto", *IMPLEMENTATIONS):
        raise InvalidParameterError(f"mode: expected auto, {', '.join(IMPLEMENTATIONS)}, got {mode!r}")
    if mode == "step" and (steps != T or offsets is not None):
        raise InvalidParameterError(f"mode: step takes one token of each sequence of a batch, got T = {T // steps}")
    if chunk_size is not None:
        is_whole = isinstance(chunk_size, Integral)
        if not is_whole or chunk_size < SMALLEST_CHUNK or chunk_size & (chunk_size - 1):
            raise InvalidParameterError(f"chunk_size: expected a power of two from {SMALLEST_CHUNK}, got {chunk_size}")

    dtype = jnp.promote_types(q.dtype, jnp.float32)
    x = DeltaInputs(
        read=q,
        erase=erase,
        write=k,
        v=v,
        beta=jnp.ones((B, T, HV), dtype) if beta is None else beta,
        g=jnp.zeros((B, T, HV), dtype) if g is None else g,
    )
    state = jnp.zeros((N, HV, K, V), dtype) if initial_state is None else initial_state.astype(dtype)
    if B == 0:
        return jnp.zeros((0, T // steps, HV, V), dtype), state if output_final_state else None
    x, state = vary_alike(jax.tree.map(jnp.asarray, (x, state)))
    offsets = None if offsets is None else offsets * steps
    options: dict[str, Any] = {
        "scale": K**-0.5 if scale is None else scale,
        "use_qk_l2norm": use_qk_l2norm,
        "erase_before_decay": erase_before_decay,
        "chunk_size": chunk_size,
    }
    if slots is not None:
        out, state = delta_slot_recurrence(x, state, slots, offsets, **options)
    else:
        run = delta_recurrence if mode == "auto" else delta_recurrence.implementations[IMPLEMENTATIONS[mode]].function
        out, state = run(x, state, offsets, **options)
    return out[:, steps - 1 :: steps], state if output_final_state else None


def sequence_parallel(rule: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """`rule` (any rule of the family) for arrays whose T axis is split over the mesh axis `axis_name`.

    Call the result inside `jax.shard_map`, with the rule's arguments; `initial_state` and the final state belong to the
    whole sequences, the same on every device. Packed sequences are not taken.

    A piece changes the state it meets by an affine map, `S -> M S + H`. Every device runs its piece once for M and H
    (`M` being where the piece takes the identity without values), gathers the maps of all devices, folds the ones
    before its own into its initial state, and runs its piece. What is sent does not grow with T.
    """

    def run(
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        v: Float[Array, "B S HV V"],
        *args: Any,
        initial_state: Float[Array, "B HV K V"] | None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"] | None]:
        if options.get("cu_seqlens") is not None:
            raise InvalidParameterError("cu_seqlens: packed sequences cannot be split over devices")
        if options.get("slots") is not None:
            raise InvalidParameterError("slots: expected none, a split sequence starts from a state of its own")
        (B, _, HV, V), K = v.shape, q.shape[-1]
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        identity = jnp.broadcast_to(jnp.eye(K, V + K, V, dtype=dtype), (B, HV, K, V + K))
        no_values = jnp.zeros((*v.shape[:3], K), v.dtype)
        _, ends = rule(
            q, k, jnp.concatenate([v, no_values], -1), *args, initial_state=identity, output_final_state=True, **options
        )
        state = jnp.zeros((B, HV, K, V), dtype) if initial_state is None else initial_state.astype(dtype)

        def fold(state: Array, end: Array) -> tuple[Array, Array]:
            after = jnp.matmul(end[..., V:], state, precision=lax.Precision.HIGHEST) + end[..., :V]
            return after, state

        # Alike on all devices, which types say only where `check_vma` follows them. The transposes are others.
        to = "invarying" if axis_name in jax.typeof(ends).mat.varying else "varying"
        final, starts = lax.scan(fold, state, lax.all_gather(ends, axis_name, to=to))
        mine = lax.dynamic_index_in_dim(starts, lax.axis_index(axis_name), keepdims=False)
        out, _ = rule(q, k, v, *args, initial_state=mine, **options)
        return out, final if output_final_state else None

    return run
