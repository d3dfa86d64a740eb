"""Weights in 8 or 4 bits: symmetric integers with a scale for each row, or for each group of inputs in a row.

`W[f, d] ~ value[f, d] * scale[f, d // group]`. Eight bits hold -127..127. Four bits hold -8..7, and a group's largest
weight gets -8 or 7, whichever loses less on the whole group; how they are packed is said at `QuantizedWeight.values`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float16, Float32, Int, Int8, UInt16

from verax.errors import InvalidParameterError

__all__ = ["BITS", "GROUP_SIZES", "QuantizedWeight", "pack_int4", "quantize"]

BITS = (8, 4)
GROUP_SIZES = (32, 64, 128)

INT4_BLOCK = 128
"""Inputs in a block of packed 4-bit values: four registers of 32."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales"),
    meta_fields=("size_in", "group_size", "bits"),
)
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[F, D]` of a linear operation, which takes it in the place of an array. A pytree of two arrays."""

    values: Int8[Array, "F D"] | UInt16[Array, "F p"]
    """8 bits: as they are. 4 bits: for each block b of 128 inputs, 32 words; bits 4j to 4j + 3 of word i are input
    `128 b + 32 j + i`, plus 8. So one shift of a register of words gives 32 inputs in order, ready for a table look-up.
    A last block that is not full is filled up with zeros (code 8)."""
    scales: Float32[Array, "F g"] | Float16[Array, "F g"]
    """One for each group of a row; float32 or, to read less, float16."""
    size_in: int
    group_size: int | None
    """Inputs that share a scale: 32, 64 or 128; None for a whole row (8 bits only)."""
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """`(F, D)`, as of the array that this stands for."""
        return self.scales.shape[0], self.size_in

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def integers(self) -> Int8[Array, "F D"]:
        """The values, unpacked."""
        if self.bits == 8:
            return self.values
        F = self.values.shape[0]
        shifts = jnp.arange(0, 16, 4, dtype=jnp.uint16)[:, None]
        codes = (self.values.reshape(F, -1, 1, INT4_BLOCK // 4) >> shifts) & 15
        return codes.reshape(F, -1)[:, : self.size_in].astype(jnp.int8) - 8

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "F D"]:
        """The array that this stands for: value times scale in float32, rounded to `dtype`."""
        F, D = self.shape
        grouped = self.integers().reshape(F, self.scales.shape[1], -1).astype(jnp.float32)
        return (grouped * self.scales.astype(jnp.float32)[:, :, None]).reshape(F, D).astype(dtype)


def quantize(weight: Float[Array, "F D"], bits: int, group_size: int | None = None) -> QuantizedWeight:
    """Round a weight to `bits` with the scale that loses least among a few. Runs under `jit`.

    Args:
        weight: of any float dtype.
        bits: 8 or 4.
        group_size: 32, 64 or 128 inputs with a float16 scale each; None for one float32 scale a row (8 bits only).

    Raises:
        InvalidParameterError: for other numbers, or if the groups do not divide D.
    """
    F, D = weight.shape
    _check(D, bits, group_size)
    grouped = weight.astype(jnp.float32).reshape(F, -1, group_size or D)
    largest = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True)
    if bits == 8:
        low, high, candidates = -127, 127, [largest / 127]
    else:
        peak = jnp.take_along_axis(grouped, jnp.argmax(jnp.abs(grouped), axis=-1, keepdims=True), axis=-1)
        # The peak at -8 (a negative scale where it is positive), or all within -7..7, or the tails cut a little.
        low, high = -8, 7
        candidates = [-peak / 8, *(largest / 7 * shrink for shrink in (1.0, 0.95, 0.9, 0.85))]
    scale_dtype = jnp.float32 if group_size is None else jnp.float16
    best = None
    for candidate in candidates:
        scale = candidate.astype(scale_dtype)
        divisor = jnp.where(scale == 0, 1, scale.astype(jnp.float32))
        rounded = jnp.clip(jnp.round(grouped / divisor), low, high)
        loss = jnp.sum((rounded * scale.astype(jnp.float32) - grouped) ** 2, axis=-1, keepdims=True)
        if best is None:
            best = loss, rounded, scale
        else:
            better = loss < best[0]
            best = tuple(jnp.where(better, new, old) for new, old in zip((loss, rounded, scale), best, strict=True))
    assert best is not None
    _, rounded, scale = best
    integers = rounded.reshape(F, D).astype(jnp.int8)
    values = integers if bits == 8 else pack_int4(integers)
    return QuantizedWeight(values, scale[..., 0], D, group_size, bits)


def pack_int4(integers: Int[Array, "F D"]) -> UInt16[Array, "F p"]:
    """Integers of -8..7 in the layout of `QuantizedWeight.values`."""
    F, D = integers.shape
    codes = jnp.pad(integers.astype(jnp.int32) + 8, ((0, 0), (0, -D % INT4_BLOCK)), constant_values=8)
    shifts = jnp.arange(0, 16, 4)[:, None]
    words = jnp.sum(codes.reshape(F, -1, 4, INT4_BLOCK // 4) << shifts, axis=2)
    return words.reshape(F, -1).astype(jnp.uint16)


def _check(size_in: int, bits: int, group_size: int | None) -> None:
    if bits not in BITS:
        raise InvalidParameterError(f"bits: expected 8 or 4, got {bits!r}")
    if group_size is None:
        if bits == 4:
            raise InvalidParameterError("group_size: 4 bits need groups of 32, 64 or 128 inputs")
    elif group_size not in GROUP_SIZES:
        raise InvalidParameterError(f"group_size: expected 32, 64, 128 or None, got {group_size!r}")
    elif size_in % group_size:
        raise InvalidParameterError(f"group_size: {group_size} does not divide the weight's {size_in} inputs")
