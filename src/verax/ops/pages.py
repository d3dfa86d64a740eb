"""Pages of a key/value cache: floats, or int8 or float8_e4m3fn with a scale for each token and head.

Values of such pages lie as floats would, `[P, K, p, H]`, and their scales apart, `[P, K, p]`: so a token's values keep
their alignment, a kernel reads both as they are, and the scales of one head in a page of 16 tokens are one cache line.
For heads of 128 a token takes 132 bytes where bfloat16 takes 256.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int, Int8

__all__ = [
    "Pages",
    "QuantizedPages",
    "gather_pages",
    "gather_scales",
    "is_quantized",
    "new_pages",
    "page_bytes",
    "quantize_tokens",
]

# vLLM's float8 cache has a scale of 1.0. Here float8 has scales as int8 has. Relative error of attention over 2,000
# random tokens, heads of 128: 0.063 with scales, 0.077 without; 0.070 and 0.31 for values of 0.002, which float8 can
# hardly represent; 0.073 and 0.22 with a few channels past 448. They cost 4 bytes for 128.
LARGEST: dict[np.dtype, int] = {np.dtype(jnp.int8): 127, np.dtype(jnp.float8_e4m3fn): 448}
"""Magnitude that a row's largest number is given, by dtype of pages with scales: the largest finite one."""

SMALLEST = np.finfo(np.float32).tiny
"""Least scale that is divided by: reciprocals of smaller ones may overflow, and processors may take them for 0."""


class QuantizedPages(NamedTuple):
    """Quantised pages in the place of floats: token s of head k is `values[.., k, s, :] * scales[.., k, s]`."""

    values: Int8[Array, "P K p H"] | Float8e4m3fn[Array, "P K p H"]
    scales: Float32[Array, "P K p"]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(P, K, p, H)`, as of the array that this stands for."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """int8 or float8_e4m3fn."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


Pages = Float[Array, "P K p H"] | QuantizedPages


def is_quantized(dtype: DTypeLike) -> bool:
    """True if pages of this dtype have scales."""
    return jnp.dtype(dtype) in LARGEST


def new_pages(shape: tuple[int, int, int, int], dtype: DTypeLike) -> Pages:
    """Zeroed pages `(P, K, p, H)` of float32, bfloat16, int8 or float8_e4m3fn."""
    if is_quantized(dtype):
        return QuantizedPages(jnp.zeros(shape, dtype), jnp.zeros(shape[:3], jnp.float32))
    return jnp.zeros(shape, dtype)


def page_bytes(shape: tuple[int, int, int], dtype: DTypeLike) -> int:
    """Bytes of one page `(K, p, H)`, scales included."""
    K, p, H = shape
    scale = 4 if is_quantized(dtype) else 0
    return K * p * (H * jnp.dtype(dtype).itemsize + scale)


def quantize_tokens(
    x: Float[Array, "*B H"], dtype: DTypeLike = jnp.int8
) -> tuple[Int8[Array, "*B H"] | Float8e4m3fn[Array, "*B H"], Float32[Array, "*B"]]:
    """Round each row to int8 or float8_e4m3fn times its scale: the row's largest magnitude / 127, or / 448.

    A row with a number that is not finite gets a scale that is not, so that what it is multiplied with becomes NaN.
    """
    x, most = x.astype(jnp.float32), LARGEST[jnp.dtype(dtype)]
    # XLA:CPU's maximum may pass over a NaN.
    largest = jnp.where(jnp.any(jnp.isnan(x), axis=-1), jnp.nan, jnp.max(jnp.abs(x), axis=-1))
    # Compilers may turn a division by a constant into this product or not; the product has the same bits everywhere.
    scales = largest * (np.float32(1) / np.float32(most))
    usable = ((scales >= SMALLEST) & jnp.isfinite(scales))[..., None]
    values = jnp.where(usable, x * (1 / jnp.where(usable, scales[..., None], 1)), 0)
    # Float8 has no infinity: a number past its largest would become NaN.
    values = jnp.round(values) if jnp.dtype(dtype) == jnp.int8 else jnp.clip(values, -most, most)
    return values.astype(dtype), scales


def gather_pages(
    cache: Pages, pages: Int[Array, "*B W"]
) -> tuple[Float[Array, "*B K s H"], Float32[Array, "*B K s"] | None]:
    """Tokens of a list of pages, in order (s = W p), and their scales, or None for floats.

    The scales are not multiplied in yet. Values with scales come as bfloat16, which holds them exactly.
    """
    if isinstance(cache, QuantizedPages):
        return _in_order(cache.values, pages).astype(jnp.bfloat16), gather_scales(cache, pages)
    return _in_order(cache, pages), None


def gather_scales(cache: QuantizedPages, pages: Int[Array, "*B W"]) -> Float32[Array, "*B K s"]:
    """Scales of the tokens of a list of pages, in order."""
    return _in_order(cache.scales[..., None], pages)[..., 0]


def _in_order(cache: Array, pages: Int[Array, "*B W"]) -> Array:
    """`[*B K s n]` of `[P K p n]`."""
    taken = jnp.moveaxis(cache[pages], -3, -4)
    return taken.reshape(*taken.shape[:-3], -1, taken.shape[-1])
