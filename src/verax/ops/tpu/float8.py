"""Float8 numbers as bfloat16 within kernels for TPUs, which have no arithmetic for float8_e4m3fn.

Registers of a v5e and a v6e are unpacked from float8_e4m3b11fnuz: the same bits with an exponent that is larger by 4,
but one zero, and NaN in the place of the other. Bits are therefore changed four numbers at a time, and numbers are
sixteenths of what they stand for, which scales make up for. A cast by Mosaic changes them after they are unpacked.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float8e4m3fn

__all__ = ["FACTOR", "sixteenths"]

FACTOR = 16
"""Factor from a result of `sixteenths` to the number itself."""

ONES, SIZES = 0x01010101, 0x7F7F7F7F
"""Lowest bit of each byte of a word, and all bits but the sign."""


def sixteenths(x: Float8e4m3fn[Array, "S H"]) -> BFloat16[Array, "S H"]:
    """`x / 16`, exact for subnormal numbers and NaN too; -0 becomes 0. S is a multiple of 4."""
    words = pltpu.bitcast(x, jnp.int32)
    sizes = words & SIZES
    signs = words & (sizes + SIZES) & ~SIZES  # the sum has the highest bit of a byte where its size is not 0
    nans = ((sizes + ONES) >> 7) & ONES  # sizes of 0x7f, which 1 more makes 0x80
    return pltpu.bitcast(signs | (sizes + nans), jnp.float8_e4m3b11fnuz).astype(jnp.bfloat16)
