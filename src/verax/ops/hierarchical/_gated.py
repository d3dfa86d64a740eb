"""LAM's hierarchical rule without its faults: two gated delta rules that share keys and values, and exchange memory.

The gated delta rule (Yang et al., 2024, arXiv:2412.06464) at two rates, joined by LAM's flux. What differs from the
published rule, and why, is in docs/lam.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from verax.ops._dispatch import check_axes, check_count, check_shapes, vary_alike
from verax.ops.delta._inputs import l2_normalize
from verax.ops.delta._rules import gated_delta_rule
from verax.ops.hierarchical._inputs import Pair, ResonanceFlux, check_pairs, chunk_flux, token_flux


class HierarchicalState(NamedTuple):
    """State after a sequence. A sequence continued from it gives the result of one piece."""

    memory: Float[Array, "B H 2 K V"]
    """Fast and slow state."""
    keys: Float[Array, "B H K"]
    """Sums since the last mixing: of keys, ..."""
    values: Float[Array, "B H V"]
    """... of values times beta, ..."""
    products: Float[Array, "B H K V"]
    """... and of their outer products."""
    position: Int[Array, "B"]
    """Tokens since the last mixing."""

    @classmethod
    def zeros(cls, batch: int, heads: int, size_k: int, size_v: int, dtype: jnp.dtype | type) -> HierarchicalState:
        """Before the first token."""
        return cls(
            jnp.zeros((batch, heads, 2, size_k, size_v), dtype),
            jnp.zeros((batch, heads, size_k), dtype),
            jnp.zeros((batch, heads, size_v), dtype),
            jnp.zeros((batch, heads, size_k, size_v), dtype),
            jnp.zeros((batch,), jnp.int32),
        )


def hierarchical_gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    log_decays: Pair,
    gates: Pair,
    flux: ResonanceFlux,
    *,
    lengths: Int[Array, "B"] | None = None,
    initial_state: HierarchicalState | None = None,
    output_final_state: bool = False,
    coupling_interval: int = 64,
    mode: Literal["auto", "recurrent", "chunk"] = "auto",
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H V"], HierarchicalState | None]:
    """Two gated delta rules, fast and slow, on the same keys and values, mixed every `coupling_interval` tokens.

        S_x <- e^{g_x} (I - beta k k^T) S_x + beta k v^T;  o_x = gate_x S_x^T q
        o = a o_fast + (1 - a) o_slow with a = 0.5 + 0.3 phi

    and after each interval, with psi from the interval's own keys and values and c = 0.05 + 0.1 psi:

        S_fast, S_slow <- (S_fast + c psi S_slow) / (1 + c psi), (S_slow + c (1 - psi) S_fast) / (1 + c (1 - psi))

    Rows of a batch do not see each other and tokens do not see later ones. The result depends neither on the chunks
    that it is computed in, nor on where a sequence is cut and continued.

    Args:
        q, k, v, beta, gates, flux: as in `hierarchical_delta_rule`; q and k are divided by `sqrt(|x|^2 + 1e-6)` here.
        log_decays: `[B, T, H]`, at most 0, of the fast and of the slow state.
        lengths: tokens of each row that count, 0 to T; all if None. Outputs past them mean nothing.
        initial_state: state after an earlier piece; zeros if None.
        output_final_state: whether to return the state after these tokens.
        coupling_interval: part of the definition, not of the computation.
        mode, chunk_size: of the computation, as in `gated_delta_rule`.

    Returns:
        Outputs, and the state or None. Float32, or float64 if q is.

    Raises:
        InvalidParameterError: for arrays whose shapes do not fit each other, or an interval below 1.
    """
    check_axes(q=q, k=k, v=v)
    B, T, H, K = q.shape
    V = v.shape[3]
    check_shapes(
        k=(k, q.shape),
        v=(v, (B, T, H, V)),
        beta=(beta, (B, T, H)),
        lengths=(lengths, (B,)),
    )
    check_pairs((B, T, H), log_decays=log_decays, gates=gates)
    flux.check(H, K, V)
    check_count(coupling_interval=coupling_interval)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    state = HierarchicalState.zeros(B, H, K, V, dtype)
    if initial_state is not None:
        given = zip(HierarchicalState._fields, initial_state, state, strict=True)
        check_shapes(**{f"initial_state.{name}": (array, zeros.shape) for name, array, zeros in given})
        state = jax.tree.map(lambda array, zeros: jnp.asarray(array, zeros.dtype), initial_state, state)
    real = jnp.full((B,), T, jnp.int32) if lengths is None else jnp.clip(jnp.asarray(lengths, jnp.int32), 0, T)
    alive = (jnp.arange(T) < real[:, None])[..., None]
    # A choice, since padding may hold NaN.
    beta, k, v = jnp.where(alive, beta, 0).astype(dtype), *(jnp.where(alive[..., None], a, 0) for a in (k, v))
    q, k, v = l2_normalize(q), l2_normalize(k), v.astype(dtype)
    phi = token_flux(beta[..., None] * k, beta[..., None] * v, flux.token)

    layout = _Layout.of(T, coupling_interval, None if initial_state is None else state.position)
    steps = (
        q,
        k,
        v,
        beta,
        jnp.where(alive[..., None], jnp.stack(log_decays, axis=-1).astype(dtype), 0.0),
    )
    state, steps, flux = vary_alike((state, steps, flux))
    # After the last token that counts come slots without tokens, which leave everything unchanged.
    ends = state.position + real

    def interval(state: HierarchicalState, step: tuple[Array, ...]) -> tuple[HierarchicalState, Array]:
        q, k, v, beta, g, i = step
        C = q.shape[1]
        out, memory = gated_delta_rule(
            q,
            k,
            jnp.repeat(v, 2, axis=2),
            g.reshape(B, C, 2 * H),
            jnp.repeat(beta, 2, axis=2),
            scale=1.0,
            initial_state=state.memory.reshape(B, 2 * H, K, V),
            output_final_state=True,
            mode=mode,
            chunk_size=chunk_size,
        )
        assert memory is not None
        vb = beta[..., None] * v
        state = HierarchicalState(
            memory.reshape(B, H, 2, K, V),
            state.keys + jnp.sum(k, axis=1),
            state.values + jnp.sum(vb, axis=1),
            state.products + jnp.einsum("bchk,bchv->bhkv", k, vb, precision=lax.Precision.HIGHEST),
            state.position,
        )
        full = ends >= (i + 1) * coupling_interval
        return _mixed(state, full, coupling_interval, flux), out.reshape(B, C, H, 2, V)

    slots = tuple(layout.to_intervals(a) for a in steps)
    if layout.intervals == 1:
        state, out = interval(state, (*(a[0] for a in slots), jnp.zeros((), jnp.int32)))
        out = layout.from_intervals(out[None])
    else:
        state, out = lax.scan(interval, state, (*slots, jnp.arange(layout.intervals)))
        out = layout.from_intervals(out)
    a = (0.5 + 0.3 * phi)[..., None]
    fast, slow = (gate.astype(dtype)[..., None] for gate in gates)
    out = a * fast * out[..., 0, :] + (1 - a) * slow * out[..., 1, :]
    return out, state._replace(position=(ends % coupling_interval).astype(jnp.int32)) if output_final_state else None


def _mixed(state: HierarchicalState, full: Array, coupling_interval: int, flux: ResonanceFlux) -> HierarchicalState:
    """Rows whose interval is full: memories mixed, sums begun again. Others unchanged."""
    n = coupling_interval
    psi = chunk_flux(state.keys / n, state.values / n, state.products / n, flux)[..., None, None]
    c = 0.05 + 0.1 * psi
    fast, slow = state.memory[:, :, 0], state.memory[:, :, 1]
    memory = jnp.stack(
        [(fast + c * psi * slow) / (1 + c * psi), (slow + c * (1 - psi) * fast) / (1 + c * (1 - psi))], axis=2
    )

    def where(new: Array, old: Array) -> Array:
        return jnp.where(full.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    keys, values, products = (
        where(jnp.zeros_like(total), total) for total in (state.keys, state.values, state.products)
    )
    return HierarchicalState(where(memory, state.memory), keys, values, products, state.position)


class _Layout(NamedTuple):
    """Positions of tokens in intervals. A row that continues starts where it stopped in its first interval."""

    tokens: int
    intervals: int
    size: int
    offset: Array | None

    @classmethod
    def of(cls, tokens: int, size: int, offset: Array | None) -> _Layout:
        if offset is not None:
            return cls(tokens, -(-(tokens + size - 1) // size), size, offset)
        return cls(tokens, -(-tokens // size), size, None) if tokens > size else cls(tokens, 1, tokens, None)

    def to_intervals(self, x: Array) -> Array:
        """`[B, T, ...]` to `[n, B, C, ...]`, zeros where there is no token."""
        slots = self.intervals * self.size
        x = jnp.pad(x, [(0, 0), (0, slots - self.tokens)] + [(0, 0)] * (x.ndim - 2))
        if self.offset is not None:
            x = _rolled(x, -self.offset)
        return jnp.moveaxis(x.reshape(x.shape[0], self.intervals, self.size, *x.shape[2:]), 1, 0)

    def from_intervals(self, x: Array) -> Array:
        """`[n, B, C, ...]` to `[B, T, ...]`."""
        x = jnp.moveaxis(x, 0, 1)
        x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
        if self.offset is not None:
            x = _rolled(x, self.offset)
        return x[:, : self.tokens]


def _rolled(x: Array, by: Array) -> Array:
    """Row b moved `by[b]` slots to the left, around the end."""
    index = (jnp.arange(x.shape[1]) + by[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
