"""Reading a GGUF file by memory-mapping: llama.cpp's format of weights, configuration and tokenizer in one file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's reader makes an array of each
string of the vocabulary (10 s and 500 MB for 150,000 tokens), and keeps the pages of weights. Its table of types and
its `dequantize`, the numpy form of llama.cpp's own, are used here.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np

from verax.checkpoint.formats.mapped_file import MappedFile
from verax.errors import CheckpointError

__all__ = ["DTYPES", "GGUFFile", "GGUFTensor"]

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
"""Types of 32 or 256 values that share scales."""

_VERSIONS = (2, 3)
_ALIGNMENT = 32
"""Bytes, where `general.alignment` says nothing."""

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_COUNT, _KIND = struct.Struct("<Q"), struct.Struct("<I")


class GGUFTensor(NamedTuple):
    """A tensor's type, its shape (the row of a matrix is its last axis), and where it lies in the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


class GGUFFile(MappedFile):
    """An open file: `metadata` by key, and `tensors` by name."""

    def __init__(self, path: Path):
        """Map the file and read its header.

        Raises:
            CheckpointError: if the file is missing, damaged, or of a version or type that is not supported.
        """
        super().__init__(path)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, ValueError, KeyError, OverflowError) as error:
            raise self.fault(f"its header is malformed ({error})") from error

    def read(self, name: str) -> np.ndarray:
        """The bytes of a tensor's rows, `uint8 [rows, bytes of a row]`: a read-only view."""
        tensor = self.tensors[name]
        return self.view(tensor.start, tensor.end).reshape(tensor.shape[0], -1)

    def _read_header(self) -> None:
        if self.map[:4] != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file (it begins with {self.map[:4]!r})")
        version, self._at = self._unpack(_KIND, 4), 8
        if version not in _VERSIONS:
            which = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise CheckpointError(f"{self.path}: {which} GGUF is not supported; versions 2 and 3 are, little-endian")
        num_tensors, num_keys = self._count(), self._count()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._kind())
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{self.path}: one of {self.metadata['split.count']} parts; join them first: llama-gguf-split --merge"
            )
        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        begin = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in headers:
            if name in self.tensors:
                raise self.fault(f"{name} is there twice")
            self.tensors[name] = self._tensor(name, kind, shape, begin + offset)

    def _tensor_header(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._string(), self._kind()
        shape = tuple(self._count() for _ in range(dimensions))[::-1]
        return name, self._kind(), shape, self._count()

    def _tensor(self, name: str, number: int, shape: tuple[int, ...], start: int) -> GGUFTensor:
        known = gguf.GGMLQuantizationType
        kind = known(number).name if number in {int(member) for member in known} else f"number {number}"
        if kind not in DTYPES and kind not in BLOCKS:
            supported = ", ".join((*DTYPES, *BLOCKS))
            raise CheckpointError(f"{self.path}: {name} is of type {kind}, which is not supported; {supported} are")
        block, block_bytes = gguf.GGML_QUANT_SIZES[known[kind]]
        if not shape or 0 in shape or shape[-1] % block:
            raise self.fault(f"{name} of shape {list(shape)} cannot be {kind}, in blocks of {block}")
        end = start + math.prod(shape) // block * block_bytes
        if end > self.size:
            raise self.fault(f"{name} ends at byte {end}, but the file has {self.size}")
        return GGUFTensor(kind, shape, start, end)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        kind, count = self._kind(), self._count()
        if kind != _STRING:
            return self._numbers(kind, count)
        self._need(count * _COUNT.size)
        return [self._string() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind} at byte {self._at}")
        dtype = np.dtype(_NUMBERS[kind])
        self._need(count * dtype.itemsize)
        values = np.frombuffer(self.map, dtype, count, self._at).tolist()
        self._at += count * dtype.itemsize
        return values

    def _string(self) -> str:
        length = self._count()
        self._need(length)
        text = self.map[self._at : self._at + length].decode()
        self._at += length
        return text

    def _need(self, length: int) -> None:
        if self._at + length > self.size:
            raise ValueError(f"{length} bytes at byte {self._at} of {self.size}")

    def _count(self) -> int:
        value = self._unpack(_COUNT, self._at)
        self._at += _COUNT.size
        return value

    def _kind(self) -> int:
        value = self._unpack(_KIND, self._at)
        self._at += _KIND.size
        return value

    def _unpack(self, form: struct.Struct, at: int) -> int:
        return form.unpack_from(self.map, at)[0]
