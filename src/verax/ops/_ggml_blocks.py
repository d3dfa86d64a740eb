"""The blocks of ggml's quantised types, taken apart: integers and scales as they are, in the order of the inputs.

The structures are those of ggml-common.h, https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float16, UInt8

__all__ = ["BLOCKS", "IQ4_NL_VALUES", "Parsed", "parse_blocks"]

BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
}
"""Values and bytes of a block."""

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Parsed(NamedTuple):
    """The parts of blocks: codes without a sign, and scales, minimums and factors where the type has them."""

    codes: UInt8[np.ndarray, "F B size"]
    scales: Float16[np.ndarray, "F B 1"] | UInt8[np.ndarray, "F B groups"]
    minimums: Float16[np.ndarray, "F B 1"] | UInt8[np.ndarray, "F B groups"] | None = None
    factors: Float16[np.ndarray, "F B 2"] | None = None
    """Factors of scales and of minimums; the second is zero where there are none."""


def parse_blocks(kind: str, blocks: UInt8[np.ndarray, "F B bytes"]) -> Parsed:
    """Parts of blocks of a type out of `BLOCKS`."""
    if kind in ("Q4_K", "Q5_K"):
        codes = _halves(blocks[..., -128:], 32)
        if kind == "Q5_K":
            codes |= _bits(blocks[..., 16:48], 1) << 4
        return Parsed(codes, *_six_bits(blocks[..., 4:16]), _float16(blocks[..., :4]))
    if kind == "Q6_K":
        codes = _halves(blocks[..., :128], 64)
        high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
        codes |= _bits(high, 2).reshape(codes.shape) << 4
        factors = np.pad(blocks[..., 208:], ((0, 0), (0, 0), (0, 2)))
        return Parsed(codes, blocks[..., 192:208], None, _float16(factors))
    if kind == "Q8_0":
        return Parsed(blocks[..., 2:] ^ 128, _float16(blocks[..., :2]))
    codes = _halves(blocks[..., -16:], 16)
    if kind in ("Q5_0", "Q5_1"):
        codes |= np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little") << 4
    minimums = _float16(blocks[..., 2:4]) if kind in ("Q4_1", "Q5_1") else None
    return Parsed(codes, _float16(blocks[..., :2]), minimums)


def _float16(stored: UInt8[np.ndarray, "*B bytes"]) -> Float16[np.ndarray, "*B n"]:
    return np.ascontiguousarray(stored).view(np.float16)


def _halves(stored: UInt8[np.ndarray, "*B n"], together: int) -> UInt8[np.ndarray, "*B m"]:
    """Codes of 4 bits: the lower halves of `together` bytes, then their upper halves, and so on."""
    pieces = stored.reshape(*stored.shape[:-1], -1, 1, together) >> np.array([[0], [4]], np.uint8)
    return (pieces & 15).reshape(*stored.shape[:-1], -1)


def _bits(stored: UInt8[np.ndarray, "*B n"], bits: int) -> UInt8[np.ndarray, "*B m"]:
    """The lowest `bits` of all bytes, then the next, and so on."""
    pieces = stored[..., None, :] >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (pieces & (1 << bits) - 1).reshape(*stored.shape[:-1], -1)


def _six_bits(stored: UInt8[np.ndarray, "*B 12"]) -> tuple[UInt8[np.ndarray, "*B 8"], UInt8[np.ndarray, "*B 8"]]:
    """Scales and minimums of 6 bits: four of each in the lower bits, the other four divided over the rest."""
    scales, minimums, rest = (stored[..., at : at + 4] for at in (0, 4, 8))
    return (
        np.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], axis=-1),
        np.concatenate([minimums & 63, rest >> 4 | minimums >> 2 & 48], axis=-1),
    )
