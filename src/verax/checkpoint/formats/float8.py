"""Weights in 8-bit and 4-bit floats: FP8 of DeepSeek-V3, Qwen3-FP8, FBGEMM and compressed-tensors, and MXFP4.

FP8: a weight `X.weight` of shape `[F, D]` is float8_e4m3fn, with scales to multiply it by:

- `X.weight_scale_inv` or `X.weight_scale` `[F / rows, D / columns]`, both rounded up, a scale for each block of
  `weight_block_size` (128 x 128);
- `X.weight_scale` `[F, 1]`, a scale for a row, or of one element, for the whole weight;
- `X.weight_scale` uint8 `[F, D / 32]`, powers of two with an offset of 127 (E8M0): MXFP8.

Inputs are not quantised here: products are more precise than where these checkpoints run in FP8. Scales of activations
and caches are therefore not read. DeepSeek-V3 (arXiv:2412.19437), `inference/kernel.py`; transformers,
`integrations/finegrained_fp8.py`.

MXFP4 (OCP Microscaling Formats, version 1.0): floats E2M1, 32 of which share a power of two. In compressed-tensors'
mxfp4-pack-quantized, `X.weight_packed` is uint8 `[F, D / 2]`, with input 2i of a row in the low bits of byte i, and
`X.weight_scale` uint8 `[F, D / 32]`, exponents with an offset of 127. Twice an E2M1 is an integer of -12..12, so that
the weight is held exactly as integers of 8 bits, in twice the memory of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from verax.checkpoint.formats.integers import (
    GROUPS,
    fits,
    fitting_group,
    fitting_scales,
    lay_out,
    nibbles,
    spread,
    unfitting,
)
from verax.errors import CheckpointError
from verax.fields import Size, read_value
from verax.ops.quantized import QuantizedWeight

if TYPE_CHECKING:
    from verax.checkpoint.formats.safetensors import TensorInfo

__all__ = ["describe_float8", "describe_mxfp4", "find_float8", "is_ignored"]

DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
_NAN = 0x7F
"""Bits of a NaN without its sign. The type has no infinity."""

_SCALES = ("weight_scale_inv", "weight_scale")
_IGNORED = re.compile(r"\.(input|activation|output|[qkv])_(scale|zero_point)$")


class Float8Weight(NamedTuple):
    """A quantised weight of a file."""

    where: object
    keys: tuple[str, str]
    """Keys of the values and of the scales."""
    shape: tuple[int, int]
    block: tuple[int, int]
    """Outputs and inputs that share a scale."""

    @property
    def kind(self) -> str:
        """Dtype, and what shares a scale."""
        rows, columns = self.block
        if columns < self.shape[1]:
            return f"float8_e4m3fn by {f'{rows}x' if rows > 1 else ''}{columns}"
        return f"float8_e4m3fn by {'rows' if rows == 1 else 'tensors'}"

    def read(self, read_raw: Callable[[str], np.ndarray]) -> QuantizedWeight:
        """Copy it out of its file, exactly.

        Raises:
            CheckpointError: if a value is not a number.
        """
        values, scales = (read_raw(key) for key in self.keys)
        if (values.view(np.uint8) & _NAN == _NAN).any():
            raise CheckpointError(f"{self.where}: {self.keys[0]} has values that are not numbers")
        (F, D), (rows, columns) = self.shape, self.block
        if scales.dtype == np.uint8:
            scales = powers_of_two(scales)
        scales = np.asarray(scales, np.float32).reshape(-(-F // rows), -(-D // columns))
        group = fitting_group(columns, D, 8)
        scales = fitting_scales(spread(scales[np.arange(F) // rows], columns, D, group), group)
        return QuantizedWeight(jnp.array(values), jnp.array(scales), F, D, group, 8)


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Numbers of type E8M0 in float32: uint8 exponents with an offset of 127."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def is_ignored(key: str) -> bool:
    """True for a scale of activations or of a cache, which are not quantised by a checkpoint here."""
    return _IGNORED.search(key) is not None


def describe_float8(
    tensors: Mapping[str, TensorInfo], keys: tuple[str, str], block: tuple[int, int] | None, where: object
) -> Float8Weight:
    """The weight with these keys, of values and of scales.

    Args:
        tensors: all arrays of the checkpoint.
        keys: keys of the values and of the scales.
        block: outputs and inputs that share a scale, where the configuration has them.
        where: name of the checkpoint for messages.

    Raises:
        CheckpointError: if the scales do not go with the values, or have groups that verax cannot compute with.
    """
    values, scales = (tensors[key] for key in keys)
    if values.dtype == DTYPE and len(values.shape) == 2:
        F, D = values.shape
        grid = scales.shape if len(scales.shape) == 2 else (*scales.shape, 1, 1)[:2]
        options = [(F, D)] if grid == (1, 1) else [(1, D // grid[1])] if grid[0] == F and grid[1] else []
        for rows, columns in ([] if block is None else [block]) + options:
            whole = grid == (-(-F // rows), -(-D // columns)) if rows and columns else False
            if whole and fits(columns, D, 8):
                return Float8Weight(where, keys, (F, D), (rows, min(columns, D)))
    raise unfitting(tensors, keys, f"8-bit floats (float8_e4m3fn) with {GROUPS}, shared by rows or not", where)


def find_float8(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    where: object,
) -> tuple[dict[str, Float8Weight], set[str]]:
    """The quantised weights among a checkpoint's tensors, by their plain key; and all keys that make them up.

    Raises:
        CheckpointError: for values or scales that verax cannot compute with, naming them.
    """
    block = read_value(config, "weight_block_size", tuple[Size, Size], None)
    weights: dict[str, Float8Weight] = {}
    parts: set[str] = set()
    for key, info in tensors.items():
        stem, _, last = key.rpartition(".")
        if is_ignored(key):
            parts.add(key)
        if last != "weight" or info.dtype.itemsize > 1:
            continue
        scales = next((f"{stem}.{name}" for name in _SCALES if f"{stem}.{name}" in tensors), None)
        if scales is None:
            raise CheckpointError(f"{where}: {key} has no {' or '.join(f'{stem}.{name}' for name in _SCALES)} with it")
        weights[key] = describe_float8(tensors, (key, scales), block, where)
        parts |= {key, scales}
    return weights, parts


_MXFP4_GROUP = 32
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the number that each code stands for."""

_NAN_EXPONENT = 255
"""Exponent that stands for NaN."""


class MXFP4Weight(NamedTuple):
    """A quantised weight of a file."""

    where: object
    keys: tuple[str, str]
    """Keys of the values and of the scales."""
    shape: tuple[int, int]

    @property
    def kind(self) -> str:
        """Name of the format."""
        return "MXFP4"

    def read(self, read_raw: Callable[[str], np.ndarray]) -> QuantizedWeight:
        """Copy it out of its file, exactly.

        Raises:
            CheckpointError: if a scale is not a number.
        """
        values, exponents = (read_raw(key) for key in self.keys)
        if (exponents == _NAN_EXPONENT).any():
            raise CheckpointError(f"{self.where}: {self.keys[1]} has values that are not numbers")
        return lay_out(_DOUBLED[nibbles(values)], powers_of_two(exponents) / 2, 8, _MXFP4_GROUP)


def describe_mxfp4(tensors: Mapping[str, TensorInfo], keys: tuple[str, str], where: object) -> MXFP4Weight:
    """The weight with these keys, of values and of scales.

    Raises:
        CheckpointError: if the scales do not go with the values.
    """
    values, scales = (tensors[key] for key in keys)
    if len(values.shape) == 2:
        F, D = values.shape[0], 2 * values.shape[1]
        if scales.dtype == np.uint8 and scales.shape == (F, D // _MXFP4_GROUP) and fits(_MXFP4_GROUP, D, 8):
            return MXFP4Weight(where, keys, (F, D))
    raise unfitting(tensors, keys, f"MXFP4 with an exponent (uint8) for {_MXFP4_GROUP} inputs", where)
