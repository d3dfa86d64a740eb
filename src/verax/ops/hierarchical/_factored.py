"""The published rules with less arithmetic: the same result, in exact arithmetic, without any C x C x C product.

Everything inside a chunk is a product with the lower triangle of a matrix of rank K. That holds for T too:
`(A A^T)[i, j] = kb_i . (sum_{l < j} k_l k_l^T) kb_j` for j < i, and that sum times kb_j is row j of
`M = tril(kb k^T, -1) k`, so

    T = I - tril(kb (k - M)^T, -1)

Such a product needs squares of BLOCK tokens only; what is left of them goes through `[K, V]` sums over earlier blocks.
And with `Y = q - P W` the output of a chunk is `P U + Y R_x`, so that the walk over the chunks has the states alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from verax.ops.hierarchical._chunks import Chunks, HierarchicalInputs, Pair, joined, unit
from verax.ops.hierarchical._flux import ResonanceFlux, chunk_flux, token_flux
from verax.ops.hierarchical._published import (
    FORGET,
    LOCAL_SHARES,
    hierarchical_rule,
    local_rule,
    matmul,
    mixed,
    slow_state,
)

__all__ = ["hierarchical_factored", "local_outputs"]

BLOCKS = (64, 32)
"""Tokens of a block: the first that divides a chunk; else the chunk."""


class Within(NamedTuple):
    """Results of each chunk's tokens that do not depend on the state."""

    inner: Float[Array, "B n H C both"]
    """`P U` and, beside it, Y."""
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
    found, states = walk(chunks, x.decays, inputs.flux)
    return read(chunks.inner, chunks.shares, found), states


def within(x: Chunks, flux: ResonanceFlux) -> Within:
    """Results that do not depend on the state, of all chunks at once."""
    V = x.v.shape[-1]
    both = _pseudo_values(x, jnp.concatenate([x.v, x.kb], axis=-1))
    inner = lower_product(x.q, x.k, both, diagonal=0)
    sums = jnp.concatenate([x.k.sum(-2), both[..., :V].sum(-2)], axis=-1)
    inner = jnp.concatenate([inner[..., :V], x.q - inner[..., V:]], axis=-1)
    share = 0.5 + 0.3 * token_flux(x.kb, x.v, flux.token)
    shares = jnp.stack([share * x.gates[0], (1 - share) * x.gates[1]], axis=-1)
    return Within(inner, shares, matmul(x.k.mT, both), sums)


def walk(x: Within, decays: Pair, flux: ResonanceFlux) -> tuple[Float[Array, "B n H 2 K V"], Pair]:
    """States that each chunk reads, and those after the last chunk; decays `[B n H C]`."""
    C, K = x.inner.shape[-2], x.product.shape[-2]
    V = x.product.shape[-1] - K
    means = x.sums / C
    psi = chunk_flux(means[..., :K], means[..., K:], x.product[..., :V] / C, flux)
    keep = tuple(decay.mean(-1) * (1 - by * psi) for decay, by in zip(decays, FORGET, strict=True))

    def chunk(states: Pair, step: tuple[Array, ...]) -> tuple[Pair, Array]:
        product, psi, *keep = step
        new, erased = product[..., :V], product[..., V:]
        states = keep[0][..., None, None] * states[0], keep[1][..., None, None] * states[1]
        found = unit(states[0]), unit(states[1])
        fast, slow = (s + new - matmul(erased, r) for s, r in zip(states, found, strict=True))
        return mixed(fast, slow, psi), jnp.stack(found, axis=2)

    zero = jnp.zeros_like(x.product[:, 0, ..., :V])
    states, found = lax.scan(chunk, (zero, zero), tuple(jnp.moveaxis(a, 1, 0) for a in (x.product, psi, *keep)))
    return jnp.moveaxis(found, 0, 1), states


def read(
    inner: Float[Array, "B n H C both"], shares: Float[Array, "B n H C 2"], found: Float[Array, "B n H 2 K V"]
) -> Float[Array, "B T H V"]:
    """Outputs, from what the tokens make without a state and the states that they read."""
    V = found.shape[-1]
    fast, slow = (inner[..., :V] + matmul(inner[..., V:], found[..., i, :, :]) for i in range(2))
    return joined(shares[..., :1] * fast + shares[..., 1:] * slow)


@local_rule.implementation("factored")
def _local_factored(
    inputs: HierarchicalInputs, *, chunk_size: int, output_final_state: bool = False
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    x = inputs.chunks(chunk_size)
    state = slow_state(x.k, _pseudo_values(x, x.v), x.decays[1], inputs.flux) if output_final_state else None
    return local_outputs(x), state


def local_outputs(x: Chunks) -> Float[Array, "B T H V"]:
    """Outputs of the local rule."""
    V = x.v.shape[-1]
    inner = lower_product(x.q, x.k, jnp.concatenate([x.v, _pseudo_values(x, x.v)], axis=-1), diagonal=0)
    fast, slow = (by * gate[..., None] for by, gate in zip(LOCAL_SHARES, x.gates, strict=True))
    return joined(fast * inner[..., :V] + slow * inner[..., V:])


def _pseudo_values(x: Chunks, right: Float[Array, "*B C D"]) -> Float[Array, "*B C D"]:
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
