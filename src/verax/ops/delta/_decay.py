"""Decays inside a chunk: exponentials of non-positive differences of cumulative log decays, and of nothing else.

Log decays are `[..., C, 1]` (one a head) or `[..., C, K]` (one a key channel).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

LOWEST = -1e4
"""Log decays below this are taken as this: the exponential of either is zero, in float32 and in float64."""

GRID = 1 / 16
"""Coarse parts of log decays are multiples of this, so that float32 sums of them are exact up to 2^20."""

BASE = 8
"""Decays by channel: products inside blocks of this many tokens are summed channel by channel, the others by matmul."""


class LogDecay(NamedTuple):
    """Log decay from the start of the chunk up to each token, as an exact coarse sum and a small rest.

    A float32 sum over strong decays (-100 a token) is off by 1e-3, and so would be the difference of two later entries,
    between which the decay may be weak. The coarse parts of a difference cancel exactly.
    """

    coarse: Array
    fine: Array

    @classmethod
    def summed(cls, g: Float[Array, "*B C D"]) -> LogDecay:
        """Cumulative sum over the tokens of a chunk, each token's own decay included."""
        g = jnp.maximum(g, LOWEST)
        coarse = lax.stop_gradient(jnp.round(g / GRID) * GRID)
        return cls(jnp.cumsum(coarse, axis=-2), jnp.cumsum(g - coarse, axis=-2))

    def before(self) -> LogDecay:
        """Each token's own decay left out."""
        first = [(0, 0)] * (self.fine.ndim - 2) + [(1, 0), (0, 0)]
        return self.map(lambda part: jnp.pad(part[..., :-1, :], first))

    def map(self, function: Callable[[Array], Array]) -> LogDecay:
        """Both parts changed alike."""
        return LogDecay(function(self.coarse), function(self.fine))

    def rows(self, start: int, stop: int | None) -> LogDecay:
        """Tokens `start` to `stop` of the chunk, or to its end."""
        return self.map(lambda part: part[..., start:stop, :])

    def since(self, other: LogDecay) -> Array:
        """Log decay from `other` to here; shapes broadcast."""
        return (self.coarse - other.coarse) + (self.fine - other.fine)

    def since_start(self) -> Array:
        """Log decay from the start of the chunk."""
        return self.coarse + self.fine


def decayed_products(
    x: Float[Array, "*B H C K"], write: Float[Array, "*B H C K"], seen: LogDecay, written: LogDecay, *, diagonal: bool
) -> Float[Array, "*B H R C C"]:
    """`sum_k x[i, k] write[j, k] exp(seen[i, k] - written[j, k])` for j < i (j <= i with `diagonal`), else 0.

    Args:
        x, write: keys of a chunk, shared by the R value heads of a group.
        seen: log decays `[*B H R C D]` up to where x reads; `written` itself, or `written.before()`.
        written: log decays up to each write.
        diagonal: whether a token reads what it writes.
    """
    C = x.shape[-2]
    visible = np.tril(np.ones((C, C), bool), 0 if diagonal else -1)
    if written.fine.shape[-1] == 1:
        # Masked before the exponential: what lies above the diagonal would overflow and poison the gradient.
        decay = jnp.exp(jnp.where(visible, seen.since(written.map(lambda part: part.swapaxes(-1, -2))), -jnp.inf))
        return _matmul(x, write)[..., None, :, :] * decay
    # Leading axes in one: XLA:CPU (jaxlib 0.10.2) crashes on reductions of arrays with seven axes.
    *lead, R, _, K = written.fine.shape
    seen, written = (decay.map(lambda part: part.reshape(-1, R, C, K)) for decay in (seen, written))
    products = _by_channel(x.reshape(-1, 1, C, K), write.reshape(-1, 1, C, K), seen, written, diagonal)
    return products.reshape(*lead, R, C, C)


def _by_channel(x: Array, write: Array, seen: LogDecay, written: LogDecay, diagonal: bool) -> Array:
    """Lower triangle, channel by channel.

    Diagonal blocks of size b are joined pairwise: between the two halves of a block of size 2b, decays are taken
    against the last token of the first half, so both exponents are at most 0 and the products are one matmul.
    """
    C = x.shape[-2]
    size = min(BASE, C)
    products = _base(_blocks(x, size), _blocks(write, size), _blocks(seen, size), _blocks(written, size), diagonal)
    while size < C:
        double = 2 * size
        reads, writes = _blocks(seen, double), _blocks(written, double)
        middle = writes.rows(size - 1, size)
        late = _blocks(x, double)[..., size:, :] * jnp.exp(reads.rows(size, double).since(middle))
        early = _blocks(write, double)[..., :size, :] * jnp.exp(middle.since(writes.rows(0, size)))
        cross = _matmul(late, early)
        products = products.reshape(*products.shape[:-3], C // double, 2, size, size)
        first, second = products[..., 0, :, :], products[..., 1, :, :]
        products = jnp.block([[first, jnp.zeros_like(cross)], [cross, second]])
        size = double
    return products[..., 0, :, :]


@partial(jax.checkpoint, static_argnums=4)
def _base(x: Array, write: Array, seen: LogDecay, written: LogDecay, diagonal: bool) -> Array:
    """Blocks small enough to multiply out; made again in the backward pass, instead of kept as `C C K` numbers."""
    size = x.shape[-2]
    visible = np.tril(np.ones((size, size), bool), 0 if diagonal else -1)[..., None]
    rows, columns = seen.map(lambda part: part[..., :, None, :]), written.map(lambda part: part[..., None, :, :])
    decay = jnp.exp(jnp.where(visible, rows.since(columns), -jnp.inf))
    return jnp.sum(x[..., :, None, :] * write[..., None, :, :] * decay, axis=-1)


def _blocks(x: Any, size: int) -> Any:
    """`[..., C, D]` cut into `[..., C / size, size, D]`, both parts of a log decay alike."""
    if isinstance(x, LogDecay):
        return x.map(lambda part: _blocks(part, size))
    *lead, C, D = x.shape
    return x.reshape(*lead, C // size, size, D)


def _matmul(x: Array, y: Array) -> Array:
    """`x y^T`."""
    return jnp.einsum("...ik,...jk->...ij", x, y, precision=lax.Precision.HIGHEST)
