"""The rule of `EnhancedHierarchicalDeltaNet` as its authors published it, oddities included, and what their production
form computes at inference (Qonsult1001/arxiv, folder LAM; written from the equations, which docs/lam.md gives).

Letters: B batch, T tokens, H heads, K and V sizes of keys and values, n chunks of C tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from verax.ops._dispatch import Example, float32, operation, vary_alike
from verax.ops.delta._scan import matmul
from verax.ops.hierarchical._inputs import (
    Chunks,
    HierarchicalInputs,
    Pair,
    Perceptron,
    ResonanceFlux,
    chunk_flux,
    joined,
    token_flux,
    unit,
)

FORGET = (0.1, 0.05)
"""Factors by which a chunk's flux shortens the memory of the fast and of the slow state."""

LOCAL_SHARES = (0.1, 0.9)
"""Shares of the fast and of the slow output in the local rule."""


def hierarchical_delta_rule(
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
    """LAM's rule (published variant B): two states, read normalised, written and mixed after each chunk.

    In each chunk, with `A = -tril(beta k k^T, -1)`, `T = I + A + tril(A A^T, -1)` and `P = tril(q k^T)`:

        U, W = T beta v, T beta k
        S_x <- mean(decay_x) (1 - forget_x psi) S_x;  R_x = S_x / |S_x|
        V_x = U - W R_x;  o_x = gate_x (q R_x + P V_x);  o = a o_fast + (1 - a) o_slow with a = 0.5 + 0.3 phi
        S_x <- S_x + k^T V_x;  both are mixed, with c = 0.05 + 0.1 mean(psi);  S_x <- S_x / |S_x|

    T is not the inverse that a delta rule needs; the result depends on `chunk_size`, on whether that divides T, and by
    the mean of psi on the other rows of the batch. `hierarchical_gated_delta_rule` is the rule without these faults.

    Args:
        q, k, v: queries, keys, values. q and k are divided by their lengths here; they have no other scale.
        beta: how much of the old value is replaced.
        decays: `[B, T, H]`, between 0 and 1, of the fast and of the slow state.
        gates: `[B, T, H]`, factors on what is read from the fast and from the slow state.
        flux: blends the two outputs (phi) and mixes the two states (psi).
        chunk_size: tokens of a chunk. All tokens are one chunk if it does not divide T, or if T is at most 32.

    Returns:
        Outputs, and both states `[B, H, K, V]` after the last chunk. Float32, or float64 if q is.

    Raises:
        InvalidParameterError: for arrays whose shapes do not fit each other, or a chunk size below 1.
    """
    x = HierarchicalInputs(q, k, v, beta, decays, gates, flux).checked(chunk_size)
    return hierarchical_rule(x, chunk_size=chunk_size)


@operation
def hierarchical_rule(inputs: HierarchicalInputs, *, chunk_size: int) -> tuple[Float[Array, "B T H V"], Pair]:
    """Operation that `hierarchical_delta_rule` calls with checked inputs."""
    x, flux = inputs.chunks(chunk_size), inputs.flux
    u, w = _pseudo_values(x.k, x.kb, x.v)
    p = _lower(x.q, x.k, 0)
    share = 0.5 + 0.3 * token_flux(x.kb, x.v, flux.token)
    psi = chunk_flux(x.k.mean(-2), u.mean(-2), matmul(x.k.mT, u) / x.k.shape[-2], flux)
    keep = tuple(decay.mean(-1) * (1 - by * psi) for decay, by in zip(x.decays, FORGET, strict=True))

    def chunk(states: Pair, step: tuple[Array, ...]) -> tuple[Pair, Array]:
        q, k, u, w, p, share, psi, *rest = step
        keep, gates = rest[:2], rest[2:]
        outs, written = [], []
        for i, state in enumerate(states):
            state = keep[i][..., None, None] * state
            unit_state = unit(state)
            value = u - matmul(w, unit_state)
            outs.append(gates[i][..., None] * (matmul(q, unit_state) + matmul(p, value)))
            written.append(state + matmul(k.mT, value))
        out = share[..., None] * outs[0] + (1 - share[..., None]) * outs[1]
        return mixed(written[0], written[1], psi), out

    steps = (x.q, x.k, u, w, p, share, psi, *keep, *x.gates)
    B, _, H, _, K = x.k.shape
    zero = jnp.zeros((B, H, K, x.v.shape[-1]), x.v.dtype)
    states, steps = vary_alike(((zero, zero), steps))
    states, out = lax.scan(chunk, states, tuple(jnp.moveaxis(a, 1, 0) for a in steps))
    return joined(jnp.moveaxis(out, 0, 1)), states


def mixed(fast: Float[Array, "B H K V"], slow: Float[Array, "B H K V"], psi: Float[Array, "B H"]) -> Pair:
    """Each state with a share of the other, and normalised. The mean over the batch is the published one."""
    coupling = 0.05 + 0.1 * jnp.mean(psi)
    psi = psi[..., None, None]
    return unit(fast + coupling * psi * slow), unit(slow + coupling * (1 - psi) * fast)


def local_delta_rule(
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
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    """Rule of the published package at inference (variant C): chunks by themselves, without a state.

    `o = 0.1 gate_fast P beta v + 0.9 gate_slow P U`, with P and U as in `hierarchical_delta_rule`, whose arguments and
    errors these are.

    Args:
        output_final_state: sum the slow state up over the chunks, which nothing reads: for each,
            `S <- mean(decay_slow) (1 - 0.05 psi) S + k^T U`, and in the end `S / |S|`.

    Returns:
        Outputs, and the slow state or None.
    """
    x = HierarchicalInputs(q, k, v, beta, decays, gates, flux).checked(chunk_size)
    return local_rule(x, chunk_size=chunk_size, output_final_state=output_final_state)


@operation
def local_rule(
    inputs: HierarchicalInputs, *, chunk_size: int, output_final_state: bool = False
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    """Operation that `local_delta_rule` calls with checked inputs."""
    x = inputs.chunks(chunk_size)
    u, _ = _pseudo_values(x.k, x.kb, x.v)
    p = _lower(x.q, x.k, 0)
    fast, slow = (by * gate[..., None] for by, gate in zip(LOCAL_SHARES, x.gates, strict=True))
    out = joined(fast * matmul(p, x.v) + slow * matmul(p, u))
    return out, slow_state(x.k, u, x.decays[1], inputs.flux) if output_final_state else None


def slow_state(
    k: Float[Array, "B n H C K"], u: Float[Array, "B n H C V"], decay: Float[Array, "B n H C"], flux: ResonanceFlux
) -> Float[Array, "B H K V"]:
    """Slow state of `local_delta_rule` after all chunks."""
    product = matmul(k.mT, u)
    psi = chunk_flux(k.mean(-2), u.mean(-2), product / k.shape[-2], flux)
    keep = decay.mean(-1) * (1 - FORGET[1] * psi)

    def chunk(state: Array, step: Pair) -> tuple[Array, None]:
        keep, product = step
        return keep[..., None, None] * state + product, None

    steps = (jnp.moveaxis(keep, 1, 0), jnp.moveaxis(product, 1, 0))
    return unit(lax.scan(chunk, jnp.zeros_like(product.sum(1)), steps)[0])


def orthogonality_loss(states: Pair) -> Float[Array, ""]:
    """Published regulariser: `|S S^T - I|^2 / K^2`, mean over batch and heads, summed over both states."""
    loss = jnp.zeros((), states[0].dtype)
    for state in states:
        K = state.shape[-2]
        off = matmul(state, state.mT) - jnp.eye(K, dtype=state.dtype)
        loss = loss + jnp.mean(jnp.sum(off * off, axis=(-2, -1))) / K**2
    return loss


def _pseudo_values(
    k: Float[Array, "*B C K"], kb: Float[Array, "*B C K"], v: Float[Array, "*B C V"]
) -> tuple[Float[Array, "*B C V"], Float[Array, "*B C K"]]:
    """U and W of a chunk."""
    a = -_lower(kb, k, -1)
    t = jnp.eye(a.shape[-1], dtype=a.dtype) + a + _lower(a, a, -1)
    return matmul(t, v), matmul(t, kb)


def _lower(x: Array, y: Array, diagonal: int) -> Array:
    """`tril(x y^T, diagonal)`."""
    return jnp.tril(matmul(x, y.mT), diagonal)


def _examples() -> list[Example]:
    head, gate = float32(1, 64, 12, 32), float32(1, 64, 12)
    perceptrons = (Perceptron(float32(16, D), float32(16), float32(1, 16), float32(1)) for D in (65, 64))
    flux = ResonanceFlux(float32(12, 32, 32), float32(12), *perceptrons)
    x = HierarchicalInputs(head, head, head, gate, (gate, gate), (gate, gate), flux)
    return [Example((x,), {"chunk_size": 64})]


hierarchical_rule.examples = local_rule.examples = _examples()

# The same rules with less arithmetic: the same result, in exact arithmetic, without any C x C x C product.
#
# Everything inside a chunk is a product with the lower triangle of a matrix of rank K. That holds for T too:
# `(A A^T)[i, j] = kb_i . (sum_{l < j} k_l k_l^T) kb_j` for j < i, and that sum times kb_j is row j of
# `M = tril(kb k^T, -1) k`, so
#
#     T = I - tril(kb (k - M)^T, -1)
#
# Such a product needs squares of BLOCK tokens only; what lies left of them goes through `[K, V]` sums over earlier
# blocks.
# And with `Y = q - P W` the output of a chunk is `P U + Y R_x`, so that the walk over the chunks has the states alone.
BLOCKS = (64, 32)
"""Tokens of a block: the first that divides a chunk; else the chunk."""


class Within(NamedTuple):
    """Results of each chunk's tokens that do not depend on the state."""

    inner: Float[Array, "B n H C both"]
    """`P U` and, next to it, Y."""
    shares: Float[Array, "B n H C 2"]
    """Factors on what is read from the fast and from the slow state."""
    product: Float[Array, "B n H K both"]
    """`k^T U` and `k^T W`."""
    sums: Float[Array, "B n H either"]
    """Sums of the keys and of U over the tokens."""


@hierarchical_rule.implementation("factored")
def hierarchical_factored(inputs: HierarchicalInputs, *, chunk_size: int) -> tuple[Float[Array, "B T H V"], Pair]:
    """`hierarchical_delta_rule` with less arithmetic."""
    x = inputs.chunks(chunk_size)
    chunks = within(x, inputs.flux)
    units, states = walk(chunks, x.decays, inputs.flux)
    return read(chunks.inner, chunks.shares, units), states


def within(x: Chunks, flux: ResonanceFlux) -> Within:
    """Results that do not depend on the state, of all chunks at once."""
    V = x.v.shape[-1]
    both = _factored_pseudo_values(x, jnp.concatenate([x.v, x.kb], axis=-1))
    inner = lower_product(x.q, x.k, both, diagonal=0)
    sums = jnp.concatenate([x.k.sum(-2), both[..., :V].sum(-2)], axis=-1)
    inner = jnp.concatenate([inner[..., :V], x.q - inner[..., V:]], axis=-1)
    share = 0.5 + 0.3 * token_flux(x.kb, x.v, flux.token)
    shares = jnp.stack([share * x.gates[0], (1 - share) * x.gates[1]], axis=-1)
    return Within(inner, shares, matmul(x.k.mT, both), sums)


def walk(x: Within, decays: Pair, flux: ResonanceFlux) -> tuple[Float[Array, "B n H 2 K V"], Pair]:
    """States that each chunk reads, and the states after the last chunk; decays `[B n H C]`."""
    C, K = x.inner.shape[-2], x.product.shape[-2]
    V = x.product.shape[-1] - K
    means = x.sums / C
    psi = chunk_flux(means[..., :K], means[..., K:], x.product[..., :V] / C, flux)
    keep = tuple(decay.mean(-1) * (1 - by * psi) for decay, by in zip(decays, FORGET, strict=True))

    def chunk(states: Pair, step: tuple[Array, ...]) -> tuple[Pair, Array]:
        product, psi, *keep = step
        new, erased = product[..., :V], product[..., V:]
        states = keep[0][..., None, None] * states[0], keep[1][..., None, None] * states[1]
        units = unit(states[0]), unit(states[1])
        fast, slow = (s + new - matmul(erased, r) for s, r in zip(states, units, strict=True))
        return mixed(fast, slow, psi), jnp.stack(units, axis=2)

    zero = jnp.zeros_like(x.product[..., :V].sum(1))
    states, units = lax.scan(chunk, (zero, zero), tuple(jnp.moveaxis(a, 1, 0) for a in (x.product, psi, *keep)))
    return jnp.moveaxis(units, 0, 1), states


def read(
    inner: Float[Array, "B n H C both"], shares: Float[Array, "B n H C 2"], units: Float[Array, "B n H 2 K V"]
) -> Float[Array, "B T H V"]:
    """Outputs, from what the tokens make without a state and the states that they read."""
    V = units.shape[-1]
    fast, slow = (inner[..., :V] + matmul(inner[..., V:], units[..., i, :, :]) for i in range(2))
    return joined(shares[..., :1] * fast + shares[..., 1:] * slow)


@local_rule.implementation("factored")
def _local_factored(
    inputs: HierarchicalInputs, *, chunk_size: int, output_final_state: bool = False
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    x = inputs.chunks(chunk_size)
    state = slow_state(x.k, _factored_pseudo_values(x, x.v), x.decays[1], inputs.flux) if output_final_state else None
    return local_outputs(x), state


def local_outputs(x: Chunks) -> Float[Array, "B T H V"]:
    """Outputs of the local rule."""
    V = x.v.shape[-1]
    inner = lower_product(x.q, x.k, jnp.concatenate([x.v, _factored_pseudo_values(x, x.v)], axis=-1), diagonal=0)
    fast, slow = (by * gate[..., None] for by, gate in zip(LOCAL_SHARES, x.gates, strict=True))
    return joined(fast * inner[..., :V] + slow * inner[..., V:])


def _factored_pseudo_values(x: Chunks, right: Float[Array, "*B C D"]) -> Float[Array, "*B C D"]:
    """`T right`."""
    return right - lower_product(x.kb, x.k - lower_product(x.kb, x.k, x.k, diagonal=-1), right, diagonal=-1)


def lower_product(
    x: Float[Array, "*B C K"], y: Float[Array, "*B C K"], z: Float[Array, "*B C D"], *, diagonal: int
) -> Float[Array, "*B C D"]:
    """`tril(x y^T, diagonal) z`."""
    C = x.shape[-2]
    size = next((size for size in BLOCKS if C % size == 0), C)
    if size == C:
        return matmul(jnp.tril(matmul(x, y.mT), diagonal), z)
    x, y, z = (a.reshape(*a.shape[:-2], C // size, size, a.shape[-1]) for a in (x, y, z))
    within = matmul(jnp.tril(matmul(x, y.mT), diagonal), z)
    sums = matmul(y.mT, z)
    before = jnp.cumsum(sums, axis=-3) - sums
    out = within + matmul(x, before)
    return out.reshape(*out.shape[:-3], C, out.shape[-1])
