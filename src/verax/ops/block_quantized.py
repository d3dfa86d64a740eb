"""Weights in the block formats of GGUF files (Q4_K, Q6_K, Q5_0, ...): the file's integers and scales in another order.

Inputs of a row that share a scale are a group. Formats whose names end in K have super-blocks of 256 inputs: integer
scales (and minimums) of the groups, times float16 factors of the super-block.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float16, Int, UInt8, UInt32

from verax.errors import InvalidParameterError


# The blocks of ggml's quantised types are taken apart into integers and scales in the order of the inputs. Their
# structures are in ggml-common.h, https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
class Parsed(NamedTuple):
    """The parts of blocks: codes without a sign, and scales, minimums and factors where the type has them."""

    codes: UInt8[np.ndarray, "F B size"]
    scales: Float16[np.ndarray, "F B 1"] | UInt8[np.ndarray, "F B groups"]
    minimums: Float16[np.ndarray, "F B 1"] | UInt8[np.ndarray, "F B groups"] | None = None
    factors: Float16[np.ndarray, "F B 2"] | None = None
    """Factors of scales and of minimums; the second is zero where there are none."""


def parse_blocks(kind: str, blocks: UInt8[np.ndarray, "F B bytes"]) -> Parsed:
    """Parts of blocks of a type out of `BLOCK_KINDS`."""
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


# Bytes are taken four at a time, as words, of which NumPy computes as many in a second.
_EACH_BYTE = 0x01010101
_LOW_HALVES = np.uint32(_EACH_BYTE * 15)


def _words(stored: UInt8[np.ndarray, "*B n"]) -> UInt32[np.ndarray, "*B m"]:
    return np.ascontiguousarray(stored).view(np.uint32)


def _float16(stored: UInt8[np.ndarray, "*B bytes"]) -> Float16[np.ndarray, "*B n"]:
    return np.ascontiguousarray(stored).view(np.float16)


def _halves(stored: UInt8[np.ndarray, "*B n"], together: int) -> UInt8[np.ndarray, "*B m"]:
    """Codes of 4 bits: the lower halves of `together` bytes, then their upper halves, and so on."""
    words = _words(stored).reshape(*stored.shape[:-1], -1, together // 4)
    halves = np.stack([words & _LOW_HALVES, words >> 4 & _LOW_HALVES], axis=-2)
    return halves.view(np.uint8).reshape(*stored.shape[:-1], -1)


def _bits(stored: UInt8[np.ndarray, "*B n"], bits: int) -> UInt8[np.ndarray, "*B m"]:
    """The lowest `bits` of all bytes, then the next, and so on."""
    words, mask = _words(stored), np.uint32(_EACH_BYTE * ((1 << bits) - 1))
    pieces = np.stack([words >> shift & mask for shift in range(0, 8, bits)], axis=-2)
    return pieces.view(np.uint8).reshape(*stored.shape[:-1], -1)


def _six_bits(stored: UInt8[np.ndarray, "*B 12"]) -> tuple[UInt8[np.ndarray, "*B 8"], UInt8[np.ndarray, "*B 8"]]:
    """Scales and minimums of 6 bits: four of each in the lower bits, the other four divided over the rest."""
    scales, minimums, rest = (stored[..., at : at + 4] for at in (0, 4, 8))
    return (
        np.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], axis=-1),
        np.concatenate([minimums & 63, rest >> 4 | minimums >> 2 & 48], axis=-1),
    )


LANES = 16
"""Rows whose words lie side by side, one in each lane of a register."""

LAID_OUT_AT_ONCE = 1 << 20
"""Number of weights that are laid out at a time, which takes some ten bytes for each."""


@dataclass(frozen=True)
class BlockKind:
    """A format: how a row's words of 32 bits hold its codes and scales.

    A weight is `scale * (code - offset)`; with minimums, `scale * code + minimum`. Words come in units of 64 inputs, or
    of a super-block's 256. One after the other, a unit has:

    - codes: the lower halves of word j's bytes are inputs 8 j to 8 j + 3, the upper halves 8 j + 4 to 8 j + 7. Codes of
      8 bits: the bytes are inputs 4 j to 4 j + 3;
    - fifth bits: bit s of word j's byte i is input 32 j + 4 s + i's. Fifth and sixth bits: bits 2 s and 2 s + 1 of word
      j's byte i are input 16 j + 4 s + i's;
    - scales, then minimums: float16, two in a word. In a super-block: integers of 8 bits, four in a word, and in the
      unit's last word the two float16 factors of scales and minimums. The minimums' factor is subtracted.
    """

    number: int
    """ggml's number of the type."""
    block_bytes: int
    """Bytes of a block of the file."""
    bits: int
    offset: int = 0
    minimums: bool = False
    super_blocks: bool = False
    group: int = 32
    values: tuple[int, ...] = ()
    """Values that the codes are indices of, where they are not integers themselves."""

    @property
    def block(self) -> int:
        """Inputs of a block of the file."""
        return 256 if self.super_blocks else 32

    @property
    def unit(self) -> int:
        """Inputs of a unit."""
        return 256 if self.super_blocks else 64

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Words of a unit's codes, further bits, scales, minimums and factors."""
        codes, further = (self.unit // 4, 0) if self.bits == 8 else (self.unit // 8, self.unit // 32 * (self.bits - 4))
        scales = self.unit // self.group // (4 if self.super_blocks else 2)
        return codes, further, scales, scales * self.minimums, int(self.super_blocks)


_IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

BLOCK_KINDS = {
    "Q4_0": BlockKind(2, 18, bits=4, offset=8),
    "Q4_1": BlockKind(3, 20, bits=4, minimums=True),
    "Q5_0": BlockKind(6, 22, bits=5, offset=16),
    "Q5_1": BlockKind(7, 24, bits=5, minimums=True),
    "Q8_0": BlockKind(8, 34, bits=8, offset=128),
    "Q4_K": BlockKind(12, 144, bits=4, minimums=True, super_blocks=True),
    "Q5_K": BlockKind(13, 176, bits=5, minimums=True, super_blocks=True),
    "Q6_K": BlockKind(14, 210, bits=6, offset=32, super_blocks=True, group=16),
    "IQ4_NL": BlockKind(20, 18, bits=4, values=_IQ4_NL_VALUES),
}
"""Formats by llama.cpp's names."""


@partial(jax.tree_util.register_dataclass, data_fields=("words",), meta_fields=("size_out", "size_in", "kind"))
@dataclass(frozen=True)
class BlockQuantizedWeight:
    """Weight `[F, D]` of a linear operation or an embedding, in the place of an array. A pytree of one array.

    `from_blocks` makes one. 16 rows lie side by side, so that a register of words has a row in each lane (`BlockKind`
    says what a row's words hold). A last 16 that is not full has rows of zeros; a last unit of inputs that is not full,
    scales of zero.
    """

    words: Any
    """uint32 `[sixteens, units, words, 16]`, or what JAX puts in its place, as for tangents."""
    size_out: int
    size_in: int
    kind: str
    """A name out of `BLOCK_KINDS`."""

    @staticmethod
    def from_blocks(kind: str, rows: UInt8[np.ndarray, "F bytes"]) -> BlockQuantizedWeight:
        """Lay out rows of blocks, as a GGUF file has them. The words are a NumPy array.

        Raises:
            InvalidParameterError: for another kind, or rows that are not whole blocks.
        """
        if kind not in BLOCK_KINDS:
            raise InvalidParameterError(f"kind: expected one of {', '.join(BLOCK_KINDS)}, got {kind!r}")
        form = BLOCK_KINDS[kind]
        F, row_bytes = rows.shape
        if row_bytes % form.block_bytes:
            raise InvalidParameterError(f"rows: {row_bytes} bytes are not whole {kind} blocks of {form.block_bytes}")
        D = row_bytes // form.block_bytes * form.block
        words = np.zeros(BlockQuantizedWeight.shapes(kind, F, D).words.shape, np.uint32)
        step = max(LANES, LAID_OUT_AT_ONCE // max(D, 1) // LANES * LANES)
        for row in range(0, F, step):
            piece = _row_words(kind, rows[row : row + step])
            piece = np.pad(piece, ((0, -len(piece) % LANES), (0, 0), (0, 0))).reshape(-1, LANES, *words.shape[1:3])
            words[row // LANES :][: len(piece)] = np.moveaxis(piece, 1, -1)
        return BlockQuantizedWeight(words, F, D, kind)

    @staticmethod
    def shapes(kind: str, size_out: int, size_in: int) -> BlockQuantizedWeight:
        """A weight of that kind and shape, with the shape of its words in their place."""
        form = BLOCK_KINDS[kind]
        words = (-(-size_out // LANES), -(-size_in // form.unit), sum(form.parts), LANES)
        return BlockQuantizedWeight(jax.ShapeDtypeStruct(words, jnp.uint32), size_out, size_in, kind)

    @property
    def shape(self) -> tuple[int, int]:
        """`(F, D)`, as of the array that this stands for."""
        return self.size_out, self.size_in

    @property
    def nbytes(self) -> int:
        """Bytes of the words."""
        return self.words.nbytes

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "F D"]:
        """Array of floats: in float32 bit for bit what ggml and the gguf package compute; rounded to `dtype`."""
        rows = jnp.moveaxis(self.words, -1, 1).reshape(-1, *self.words.shape[1:3])[: self.size_out]
        return self._values(rows).astype(dtype)

    def rows(self, indices: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Rows, dequantised."""
        return self._values(jnp.asarray(self.words)[indices // LANES, :, :, indices % LANES])

    def _values(self, words: UInt32[Array, "*B units words"]) -> Float[Array, "*B D"]:
        form = BLOCK_KINDS[self.kind]
        ends = list(itertools.accumulate(form.parts))[:-1]
        codes, further, scales, minimums, factors = jnp.split(words, ends, axis=-1)
        values = _codes(form, codes, further)
        values = values.reshape(*values.shape[:-1], form.unit // form.group, form.group).astype(jnp.float32)
        if form.super_blocks:
            factor = _pieces(factors, jnp.float16).astype(jnp.float32)
            scale = factor[..., :1] * _pieces(scales, jnp.uint8 if form.minimums else jnp.int8).astype(jnp.float32)
            minimum = -(factor[..., 1:] * _pieces(minimums, jnp.uint8).astype(jnp.float32))
        else:
            scale, minimum = (_pieces(part, jnp.float16).astype(jnp.float32) for part in (scales, minimums))
        values = scale[..., None] * (values - form.offset)
        if form.minimums:
            values += minimum[..., None]
        return values.reshape(*words.shape[:-2], words.shape[-2] * form.unit)[..., : self.size_in]


def _pieces(words: UInt32[Array, "*B n"], dtype: DTypeLike) -> Array:
    """Numbers of `dtype` in words, the lowest bits first: `[*B, n * 32 / bits]`."""
    pieces = jax.lax.bitcast_convert_type(words, dtype)
    return pieces.reshape(*words.shape[:-1], math.prod(pieces.shape[words.ndim - 1 :]))


def _codes(form: BlockKind, codes: UInt32[Array, "*B c"], further: UInt32[Array, "*B f"]) -> Int[Array, "*B unit"]:
    """A unit's codes, or what they are indices of."""
    shape = (*codes.shape[:-1], form.unit)
    if form.bits == 8:
        return _pieces(codes, jnp.uint8).astype(jnp.int32)
    low = jax.lax.bitcast_convert_type(codes, jnp.uint8)[..., None, :]  # word, 1, byte
    result = (low >> jnp.array([[0], [4]], jnp.uint8) & 15).reshape(shape).astype(jnp.int32)
    if form.values:
        return jnp.array(form.values, jnp.int32)[result]
    if high := form.bits - 4:
        shifts = jnp.arange(0, 8, high, dtype=jnp.uint8)[:, None]
        bits = jax.lax.bitcast_convert_type(further, jnp.uint8)[..., None, :] >> shifts & (1 << high) - 1
        result += bits.reshape(shape).astype(jnp.int32) << 4
    return result


def _row_words(kind: str, rows: UInt8[np.ndarray, "F bytes"]) -> UInt32[np.ndarray, "F units words"]:
    """The words of some rows."""
    form = BLOCK_KINDS[kind]
    blocks = rows.reshape(len(rows), -1, form.block_bytes)
    if not form.super_blocks:  # two blocks make a unit
        blocks = np.pad(blocks, ((0, 0), (0, blocks.shape[1] % 2), (0, 0)))
    parsed = parse_blocks(kind, blocks)
    units = (len(rows), blocks.shape[1] * parsed.codes.shape[-1] // form.unit)
    codes = _words(parsed.codes.reshape(*units, form.unit))
    if form.bits == 8:
        parts: list[np.ndarray] = [codes]
    else:
        low = codes & _LOW_HALVES
        parts = [low[..., ::2] | low[..., 1::2] << 4]
        if high := form.bits - 4:
            bits, count = codes >> 4 & np.uint32(_EACH_BYTE * ((1 << high) - 1)), 8 // high
            parts.append(reduce(np.bitwise_or, (bits[..., i::count] << high * i for i in range(count))))
    parts += [part for part in (parsed.scales, parsed.minimums, parsed.factors) if part is not None]
    joined = np.concatenate([part.reshape(*units, -1).view(np.uint8) for part in parts], axis=-1)
    return np.ascontiguousarray(joined).view(np.uint32)
