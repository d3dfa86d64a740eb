"""Weights in MXFP4 (OCP Microscaling Formats, version 1.0): 4-bit floats E2M1, 32 of which share a power of two.

compressed-tensors' mxfp4-pack-quantized: `X.weight_packed` uint8 `[F, D / 2]`, input 2i of a row in the low bits of
byte i, and `X.weight_scale` uint8 `[F, D / 32]`, exponents with an offset of 127. Twice an E2M1 is an integer of
-12..12, so that the weight is held exactly as integers of 8 bits, in twice the memory of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from verax.checkpoint.formats.float8 import powers_of_two
from verax.checkpoint.formats.integers import fits, lay_out, nibbles, unfitting
from verax.errors import CheckpointError
from verax.ops.quantized import QuantizedWeight

if TYPE_CHECKING:
    from verax.checkpoint.formats.safetensors import TensorInfo

__all__ = ["MXFP4Weight", "describe_mxfp4"]

GROUP = 32
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the number that each code stands for."""

_NAN = 255
"""Exponent that stands for no number."""


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
        if (exponents == _NAN).any():
            raise CheckpointError(f"{self.where}: {self.keys[1]} has values that are not numbers")
        return lay_out(_DOUBLED[nibbles(values)], powers_of_two(exponents) / 2, 8, GROUP)


def describe_mxfp4(tensors: Mapping[str, TensorInfo], keys: tuple[str, str], where: object) -> MXFP4Weight:
    """The weight with these keys, of values and of scales.

    Raises:
        CheckpointError: if the scales do not go with the values.
    """
    values, scales = (tensors[key] for key in keys)
    if len(values.shape) == 2:
        F, D = values.shape[0], 2 * values.shape[1]
        if scales.dtype == np.uint8 and scales.shape == (F, D // GROUP) and fits(GROUP, D, 8):
            return MXFP4Weight(where, keys, (F, D))
    raise unfitting(tensors, keys, f"MXFP4 with an exponent (uint8) for {GROUP} inputs", where)
