"""Weights in 8 or 4 bits: integers or 8-bit floats with a scale for each row, or for each group of inputs in a row.

`W[f, d] ~ value[f, d] * scale[f, d // group]`. `quantize` makes symmetric integers: eight bits hold -127..127. Four
bits hold -8..7, and a group's largest weight gets -8 or 7, whichever loses less on the whole group. Files may also have
8-bit floats (float8_e4m3fn), a zero point for each scale (`value - zero` in the place of `value`), and groups of inputs
that are not neighbours. How they are laid out is said at `QuantizedWeight`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int, Int8, Integer

from verax.errors import InvalidParameterError
from verax.ops._dispatch import check_shapes

BITS = (8, 4)
FLOAT8 = jnp.float8_e4m3fn
LARGEST_FLOAT8 = float(jnp.finfo(FLOAT8).max)
GROUP_SIZES = (32, 64, 128)

SMALLEST_SCALE = 1e-37
"""Scale of inputs up to which they count as zeros: its inverse would not be finite."""

INT4_ROWS = 16
"""Rows whose 4-bit values lie side by side, one in each lane of a register."""


class Precision(NamedTuple):
    """Precision to quantise weights to.

    `group_size`: inputs that share a scale, 32, 64 or 128; None for a whole row (8 bits only). `is_float`: True for
    8-bit floats (float8_e4m3fn) in place of integers. `rounds_inputs`: as in `QuantizedWeight`.
    """

    bits: int
    group_size: int | None = None
    is_float: bool = False
    rounds_inputs: bool = False


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales", "zeros", "order"),
    meta_fields=("size_out", "size_in", "group_size", "bits", "rounds_inputs"),
)
@dataclass(frozen=True)
class QuantizedWeight:
    """Weight `[F, D]` of a linear operation, which takes it in the place of an array. A pytree of two to four arrays.

    `from_integers` makes one of integers; `integers` and `row_scales` give back what went in.

    With 8 bits, `values[f, d]` and `scales[f, g]` lie as one would think. With 4 bits rows lie side by side in blocks
    of 16, so that a register of values has a row in each lane: nothing is added up across lanes, and a group's scales
    are one register. Bits 4j to 4j + 3 of `values[n, b, 2 c + h]` are row `16 n + c`, input `8 b + 2 j + h`, plus 8;
    `scales[n, g, c]` is that row's. A last block that is not full is filled up with zeros (code 8).

    A stack `[E, F, D]` (of `ops.grouped_linear`) has one more axis in front of all arrays. Under `vmap` and `scan` it
    is its E weights.
    """

    values: Any
    """int8 or float8_e4m3fn `[*E, F, D]`, uint16 `[*E, blocks, eighths, 32]` of 4 bits, or what JAX puts in
    their place, as for tangents."""
    scales: Any
    """One for each group of a row, `[*E, F, g]`, of 4 bits `[*E, blocks, g, 16]`; float32 or, to read less, float16."""
    size_out: int
    size_in: int
    group_size: int | None
    """Inputs that share a scale: 32, 64 or 128; None for a whole row (8 bits only)."""
    bits: int
    zeros: Any = None
    """int8: the integer that stands for 0, laid out as the scales are; None if it is 0 everywhere."""
    order: Any = None
    """int32 `[*E, D]`: the input that each column multiplies; None if it is the column's own number."""
    rounds_inputs: bool = False
    """True if inputs become 8-bit integers as well (W8A8), with a scale for each row of them (`round_inputs`). Of 8-bit
    integers with a scale for each row only."""

    @staticmethod
    def from_integers(
        integers: Integer[Array, "F D"],
        scales: Float[Array, "F g"],
        bits: int,
        group_size: int | None = None,
        zeros: Integer[Array, "F g"] | None = None,
        order: Int[Array, "D"] | None = None,
    ) -> QuantizedWeight:
        """Lay out integers of -128..127 (8 bits) or -8..7 (4) with their scales, float32 or float16. Runs under `jit`.

        Args:
            integers: columns in the order in which groups are neighbours.
            scales: one for each group of a row.
            bits: 8 or 4.
            group_size: 32, 64 or 128 inputs; None for a whole row (8 bits only).
            zeros: integers that stand for 0, in the same range.
            order: number of the input that each column multiplies.

        Raises:
            InvalidParameterError: for other bits or groups, if the groups do not divide D, for arrays of other shapes,
                scales of another dtype, or unsigned integers.
        """
        F, D = integers.shape
        _check(D, bits, group_size)
        groups = (F, 1 if group_size is None else D // group_size)
        check_shapes(scales=(scales, groups), zeros=(zeros, groups), order=(order, (D,)))
        if scales.dtype not in (jnp.float32, jnp.float16):
            raise InvalidParameterError(f"scales: expected float32 or float16, got {scales.dtype}")
        for name, array in (("integers", integers), ("zeros", zeros)):
            if array is not None and jnp.issubdtype(array.dtype, jnp.unsignedinteger):
                raise InvalidParameterError(
                    f"{name}: expected signed integers, got {array.dtype}; subtract {1 << bits - 1} of codes from 0 on"
                )
        zeros = None if zeros is None else zeros.astype(jnp.int8)
        order = None if order is None else order.astype(jnp.int32)
        if bits == 8:
            return QuantizedWeight(integers.astype(jnp.int8), scales, F, D, group_size, bits, zeros, order)
        rows = (0, -F % INT4_ROWS)
        codes = jnp.pad((integers + 8).astype(jnp.uint16), (rows, (0, 0)), constant_values=8)
        codes = codes.reshape(-1, INT4_ROWS, D // 8, 4, 2)  # n, c, b, j, h
        shifts = jnp.arange(0, 16, 4, dtype=jnp.uint16)[:, None]
        words = jnp.sum(codes << shifts, axis=3, dtype=jnp.uint16)  # n, c, b, h
        values = words.swapaxes(1, 2).reshape(-1, D // 8, 2 * INT4_ROWS)
        by_lanes = lambda of_rows: jnp.pad(of_rows, (rows, (0, 0))).reshape(len(values), INT4_ROWS, -1).swapaxes(1, 2)
        zeros = None if zeros is None else by_lanes(zeros)
        return QuantizedWeight(values, by_lanes(scales), F, D, group_size, bits, zeros, order)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(F, D)`, or `(E, F, D)` of a stack, as of the array that this stands for."""
        return *self.values.shape[: -2 if self.bits == 8 else -3], self.size_out, self.size_in

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in jax.tree.leaves(self))

    @property
    def is_float(self) -> bool:
        """True if the values are 8-bit floats."""
        return jnp.issubdtype(self.values.dtype, jnp.floating)

    @property
    def is_plain(self) -> bool:
        """True if it is of integers without zero points, whose columns are in the order of the inputs."""
        return not self.is_float and self.zeros is None and self.order is None

    def integers(self) -> Int8[Array, "F D"]:
        """Values of a weight of integers, unpacked."""
        if self.bits == 8:
            return self.values
        shifts = jnp.arange(0, 16, 4, dtype=jnp.uint16)[:, None]
        words = self.values.reshape(len(self.values), -1, INT4_ROWS, 1, 2).swapaxes(1, 2)  # n, c, b, 1, h
        codes = (words >> shifts & 15).reshape(-1, self.size_in)
        return codes[: self.size_out].astype(jnp.int8) - 8

    def row_scales(self) -> Float[Array, "F g"]:
        """Scales of each row."""
        return self._of_rows(self.scales)

    def row_zeros(self) -> Int8[Array, "F g"] | None:
        """Zero points of each row."""
        return None if self.zeros is None else self._of_rows(self.zeros)

    def unscaled(self) -> BFloat16[Array, "F D"]:
        """Values less their zero points, which bfloat16 holds exactly, in the order of the columns."""
        if self.is_float:
            return self.values.astype(jnp.bfloat16)
        zeros = self.row_zeros()
        if zeros is None:
            return self.integers().astype(jnp.bfloat16)
        grouped = self.integers().reshape(*zeros.shape, -1).astype(jnp.int16) - zeros[:, :, None].astype(jnp.int16)
        return grouped.reshape(self.size_out, self.size_in).astype(jnp.bfloat16)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "F D"]:
        """Array of floats, in the order of the inputs: value times scale in float32, rounded to `dtype`."""
        scales = self.row_scales().astype(jnp.float32)
        grouped = self.unscaled().reshape(*scales.shape, -1).astype(jnp.float32)
        weight = (grouped * scales[:, :, None]).reshape(self.size_out, self.size_in).astype(dtype)
        return weight if self.order is None else weight[:, jnp.argsort(self.order)]

    def rows(self, indices: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Single rows in float32, of a table of embeddings."""
        if self.bits == 8:
            take = lambda array: jnp.asarray(array)[indices]
            values = take(self.values)
        else:
            take = lambda array: jnp.asarray(array)[indices // INT4_ROWS, :, indices % INT4_ROWS]
            words = take(self.values.reshape(*self.values.shape[:-1], INT4_ROWS, 2))
            codes = words[..., None, :] >> jnp.arange(0, 16, 4, dtype=jnp.uint16)[:, None] & 15
            values = codes.reshape(*indices.shape, self.size_in).astype(jnp.int8) - 8
        scales = take(self.scales).astype(jnp.float32)[..., None]
        grouped = values.astype(jnp.float32).reshape(*scales.shape[:-1], self.group_size or self.size_in)
        if self.zeros is not None:
            grouped -= take(self.zeros).astype(jnp.float32)[..., None]
        rows = (grouped * scales).reshape(values.shape)
        return rows if self.order is None else rows[..., jnp.argsort(self.order)]

    def _of_rows(self, array: Array) -> Array:
        if self.bits == 8:
            return array
        return array.swapaxes(1, 2).reshape(-1, array.shape[1])[: self.size_out]


def quantize(
    weight: Float[Array, "F D"],
    bits: int,
    group_size: int | None = None,
    is_float: bool = False,
    rounds_inputs: bool = False,
) -> QuantizedWeight:
    """Round a weight to `bits` with the scale that loses least among a few. Runs under `jit`.

    Args:
        weight: of any float dtype.
        bits: 8 or 4.
        group_size: 32, 64 or 128 inputs with a float16 scale each; None for one float32 scale a row (8 bits only).
        is_float: True for 8-bit floats, with a scale for each row.
        rounds_inputs: as in `QuantizedWeight`.

    Raises:
        InvalidParameterError: for other numbers, a weight of another shape, of integers or without any numbers, or if
            the groups do not divide D.
    """
    if len(weight.shape) != 2 or weight.size == 0 or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise InvalidParameterError(
            f"weight: expected floats [F, D], got {weight.dtype} {list(weight.shape)}; jax.vmap quantises a stack"
        )
    F, D = weight.shape
    _check(D, bits, group_size)
    if (is_float or rounds_inputs) and (bits != 8 or group_size is not None or (is_float and rounds_inputs)):
        raise InvalidParameterError("bits: 8-bit floats and rounded inputs need 8 bits and a scale for each row")
    if is_float:
        exact = weight.astype(jnp.float32)
        largest = jnp.max(jnp.abs(exact), axis=-1, keepdims=True)
        scales = jnp.where(largest == 0, 1, largest / LARGEST_FLOAT8)
        return QuantizedWeight((exact / scales).astype(FLOAT8), scales, F, D, None, 8)
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
    laid_out = QuantizedWeight.from_integers(rounded.reshape(F, D).astype(jnp.int8), scale[..., 0], bits, group_size)
    return replace(laid_out, rounds_inputs=rounds_inputs)


def round_inputs(x: Float[Array, "*B D"]) -> tuple[Int8[Array, "*B D"], Float[Array, "*B 1"]]:
    """Integers of -127..127 and a scale for each row: `x ~ integers * scale`. NaN for rows that are not finite."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127 + jnp.sum(x * 0.0, axis=-1, keepdims=True)
    factor = jnp.where(scale > SMALLEST_SCALE, 1 / scale, 0.0)
    return jnp.round(x * factor).astype(jnp.int8), scale


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
