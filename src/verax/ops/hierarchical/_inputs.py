"""Inputs of both published rules and their first steps: checks, unit keys, values scaled by beta, chunks; and the flux,
a number between 0 and 1 for each token (phi) and for each chunk of tokens (psi).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from verax.errors import InvalidParameterError
from verax.ops._dispatch import check_axes, check_count, check_shapes

LOWEST, HIGHEST = 0.01, 0.99


class Perceptron(NamedTuple):
    """Weights of `w2 silu(w1 x + b1) + b2`, a single number out."""

    w1: Float[Array, "hidden D"]
    b1: Float[Array, "hidden"]
    w2: Float[Array, "1 hidden"]
    b2: Float[Array, "1"]


class ResonanceFlux(NamedTuple):
    """Weights of both fluxes. The perceptrons are shared by all heads."""

    bilinear: Float[Array, "H K V"]
    temperature: Float[Array, "H"]
    chunk: Perceptron
    """Perceptron of `[mean key, mean value, mean score]`: D is K + V + 1."""
    token: Perceptron
    """Perceptron of `[key, value]`: D is K + V."""

    def check(self, H: int, K: int, V: int) -> None:
        """Raise `InvalidParameterError` for the first array whose shape does not fit these sizes."""
        check_shapes(**{"flux.bilinear": (self.bilinear, (H, K, V)), "flux.temperature": (self.temperature, (H,))})
        for name, (w1, b1, w2, b2), D in (("chunk", self.chunk, K + V + 1), ("token", self.token, K + V)):
            hidden = len(w1)
            shapes = ("w1", w1, (hidden, D)), ("b1", b1, (hidden,)), ("w2", w2, (1, hidden)), ("b2", b2, (1,))
            check_shapes(**{f"flux.{name}.{weight}": (array, shape) for weight, array, shape in shapes})


def token_flux(k: Float[Array, "*B K"], v: Float[Array, "*B V"], weights: Perceptron) -> Float[Array, "*B"]:
    """phi of each token's key and value, both scaled by beta."""
    return _flux(weights, k, v)


def chunk_flux(
    key: Float[Array, "*B H K"], value: Float[Array, "*B H V"], product: Float[Array, "*B H K V"], flux: ResonanceFlux
) -> Float[Array, "*B H"]:
    """psi of a chunk, from the means over its tokens of the keys, the values, and the outer products `k v^T`.

    The mean of the scores `k^T W v / temperature` is the sum over `W` times the mean outer product.
    """
    score = jnp.einsum(
        "...hkv,hkv->...h", product, flux.bilinear.astype(product.dtype), precision=lax.Precision.HIGHEST
    )
    score = score / flux.temperature.astype(product.dtype)
    return _flux(flux.chunk, key, value, score[..., None])


def _flux(weights: Perceptron, *features: Array) -> Array:
    """Flux of features in several arrays, as if they were concatenated."""
    w1, b1, w2, b2 = (w.astype(features[0].dtype) for w in weights)
    hidden, start = b1, 0
    for x in features:
        part = w1[:, start : start + x.shape[-1]]
        hidden = hidden + jnp.einsum("...d,fd->...f", x, part, precision=lax.Precision.HIGHEST)
        start += x.shape[-1]
    out = jnp.einsum("...f,f->...", jax.nn.silu(hidden), w2[0], precision=lax.Precision.HIGHEST) + b2[0]
    return jnp.clip(jax.nn.sigmoid(out), LOWEST, HIGHEST)


Pair = tuple[Array, Array]
"""One for the fast state, one for the slow."""


def check_pairs(shape: tuple[int, ...], **pairs: Pair) -> None:
    """Raise `InvalidParameterError` for the first pair that is not two arrays of this shape."""
    for name, pair in pairs.items():
        if len(pair) != 2:
            raise InvalidParameterError(f"{name}: expected two, of the fast and of the slow state, got {len(pair)}")
        check_shapes(**{f"{name}[{i}]": (array, shape) for i, array in enumerate(pair)})


KEY_EPSILON = 1e-12
"""Least length that a key or a query is divided by: PyTorch's `normalize`."""

ONE_CHUNK = 32
"""Up to this many tokens are one chunk, whatever its size."""


class HierarchicalInputs(NamedTuple):
    """Arguments of both published rules, see `hierarchical_delta_rule`."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    beta: Float[Array, "B T H"]
    decays: Pair
    """`[B T H]`."""
    gates: Pair
    """`[B T H]`."""
    flux: ResonanceFlux

    def checked(self, chunk_size: int) -> HierarchicalInputs:
        """The inputs. Raises `InvalidParameterError` for the first array whose shape does not fit q and v, or a chunk
        size that is not a whole number of at least 1."""
        check_count(chunk_size=chunk_size)
        check_axes(q=self.q, k=self.k, v=self.v)
        B, T, H, K = self.q.shape
        V = self.v.shape[3]
        check_shapes(k=(self.k, (B, T, H, K)), v=(self.v, (B, T, H, V)), beta=(self.beta, (B, T, H)))
        check_pairs((B, T, H), decays=self.decays, gates=self.gates)
        self.flux.check(H, K, V)
        return self

    def chunks(self, chunk_size: int) -> Chunks:
        """Tokens by chunks, float32 at least."""
        C = chunk_length(self.q.shape[1], chunk_size)
        dtype = jnp.promote_types(self.q.dtype, jnp.float32)
        q, k, v, beta, decays, gates = jax.tree.map(lambda x: tokens_by_chunk(x.astype(dtype), C), self[:-1])
        k, beta = normalized(k), beta[..., None]
        return Chunks(normalized(q), k, beta * k, beta * v, decays, gates)


class Chunks(NamedTuple):
    """Tokens of n chunks of C."""

    q: Float[Array, "B n H C K"]
    k: Float[Array, "B n H C K"]
    kb: Float[Array, "B n H C K"]
    """Keys times beta."""
    v: Float[Array, "B n H C V"]
    """Values times beta."""
    decays: Pair
    """`[B n H C]`."""
    gates: Pair
    """`[B n H C]`."""


def chunk_length(tokens: int, chunk_size: int) -> int:
    """Tokens of a chunk: all of them if there are few, or if `chunk_size` does not divide their number."""
    return tokens if tokens <= ONE_CHUNK or tokens % chunk_size else chunk_size


def tokens_by_chunk(x: Float[Array, "B T H *D"], size: int) -> Float[Array, "B n H C *D"]:
    """Cut T into chunks."""
    B, T, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, T // max(size, 1), size, *rest), 3, 2)


def joined(x: Float[Array, "B n H C V"]) -> Float[Array, "B T H V"]:
    """Chunks back to tokens."""
    x = jnp.moveaxis(x, 2, 3)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def normalized(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Rows divided by their lengths."""
    # The double `where` keeps the gradient of a zero row finite.
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    length = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    return x / jnp.maximum(length, KEY_EPSILON)


def unit(state: Float[Array, "*B K V"]) -> Float[Array, "*B K V"]:
    """`state / (|state| + 1e-8)`, Frobenius norm; zero stays zero, with a finite gradient."""
    square = jnp.sum(state * state, axis=(-2, -1), keepdims=True)
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    return state / (norm + 1e-8)
