"""Safetensors files, memory-mapped: arrays are views of the file, and every fault of a file has a message.

Format: https://huggingface.co/docs/safetensors/index#format. The library's numpy interface copies each tensor that it
reads and cannot give its pages back, which would double the memory of loading; its writer wants all tensors in memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from verax.errors import CheckpointError
from verax.files import refuse_pointer, write_json

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

_WINDOW = 2 * 1024 * 1024
"""The most that Linux maps around a page that is touched: a huge page of the file cache; 64 KiB on older systems."""

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""The format's own limit on the header."""


class TensorInfo(NamedTuple):
    """Place of a tensor: byte offsets from the beginning of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class MappedFile:
    """An open file of weights by key. Views stay valid while they are referenced; `release` only gives memory back."""

    tensors: dict[str, Any]
    """Dtype, shape and place of each tensor by its key."""

    def __init__(self, path: Path):
        """Map the file."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if not self.size:
                    raise self.fault("it has 0 bytes, too few for weights")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        refuse_pointer(path)

    def view(self, start: int, end: int) -> np.ndarray:
        """A read-only view of the bytes from `start` to `end`."""
        return np.frombuffer(self.map, np.uint8, end - start, start)

    def read(self, name: str) -> np.ndarray:
        """A tensor: a view of the file where that is possible."""
        raise NotImplementedError

    def kind(self, name: str) -> str:
        """Name of a tensor's dtype."""
        return str(self.tensors[name].dtype)

    def places(self, name: str) -> list[tuple[Path, int, int]]:
        """File, first byte and end of each piece of a tensor."""
        return [(self.path, self.tensors[name].start, self.tensors[name].end)]

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory. No view loses anything: a page that is touched again is mapped again."""
        self.release_pages(self.tensors[name].start, self.tensors[name].end)

    def release_pages(self, start: int, end: int) -> None:
        """Drop the pages of the bytes from `start` to `end` from memory."""
        # A window more on either side: reading the range mapped its neighbours too, which outweigh a small tensor.
        first = max(start - _WINDOW, 0) // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(end + _WINDOW, self.size)
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def fault(self, what: str) -> CheckpointError:
        """The error for content that cannot be right."""
        return CheckpointError(f"{self.path}: {what}; the file is damaged or incomplete, fetch it again")


class SafetensorsFile(MappedFile):
    """An open safetensors file.

    `metadata`: texts of its header by name, which programs write for themselves.
    """

    metadata: dict[str, str]

    def __init__(self, path: Path):
        """Map the file and check its header."""
        super().__init__(path)
        if self.size < _LENGTH_BYTES:
            raise self.fault(f"it has {self.size} bytes, too few for a safetensors header")
        self.tensors: dict[str, TensorInfo] = self._read_header()

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in the file."""
        info = self.tensors[name]
        return self.view(info.start, info.end).view(info.dtype).reshape(info.shape)

    def _read_header(self) -> dict[str, TensorInfo]:
        length = int.from_bytes(self.map[:_LENGTH_BYTES], "little")
        if length > _LONGEST_HEADER:
            raise CheckpointError(f"{self.path}: not a safetensors file (its header would have {length} bytes)")
        begin = _LENGTH_BYTES + length
        if begin > self.size:
            raise self.fault(f"the header of {length} bytes does not fit into its {self.size} bytes")
        try:
            header = json.loads(self.map[_LENGTH_BYTES:begin].decode("utf-8"))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            self.metadata = {name: str(text) for name, text in header.get("__metadata__", {}).items()}
        except (ValueError, AttributeError, RecursionError) as error:
            raise self.fault("its header is not valid JSON") from error
        tensors = {name: self._read_entry(name, entry, begin) for name, entry in entries.items()}
        self._check_layout(tensors, begin)
        return tensors

    def _read_entry(self, name: str, entry: Any, begin: int) -> TensorInfo:
        try:
            kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            sound = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, start, end))
        except (TypeError, KeyError, ValueError) as error:
            raise self.fault(f"the header's entry of {name} is malformed") from error
        if not sound:
            raise self.fault(f"the header's entry of {name} is malformed")
        if kind not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} has dtype {kind}; supported are {', '.join(DTYPES)}")
        dtype = DTYPES[kind]
        if end - start != math.prod(shape) * dtype.itemsize:
            raise self.fault(f"{name} of shape {list(shape)} and dtype {kind} cannot have {end - start} bytes")
        if begin + end > self.size:
            raise self.fault(f"{name} ends at byte {begin + end}, but the file has {self.size}")
        return TensorInfo(dtype, shape, begin + start, begin + end)

    def _check_layout(self, tensors: dict[str, TensorInfo], begin: int) -> None:
        """The format allows neither overlaps nor holes."""
        at = begin
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
            if info.start != at:
                raise self.fault(f"{name} begins at byte {info.start} where byte {at} was expected")
            at = info.end
        if at != self.size:
            raise self.fault(f"its tensors end at byte {at}, but the file has {self.size}")


SHARD_BYTES = 5 * 10**9
"""Largest size of a file of weights in bytes, as on the hub."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}


class NewTensor(NamedTuple):
    """A tensor to write."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read: Callable[[], Any]
    """Function that gives the array, which is rounded to `dtype`."""
    release: Callable[[], object] = lambda: None

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path, stem: str, tensors: Mapping[str, NewTensor], max_shard_bytes: int = SHARD_BYTES
) -> Iterator[NewTensor]:
    """Write `stem.safetensors`, or as many numbered files as needed and their index. One tensor is in memory at a time.

    `stem`: beginning of their names. `max_shard_bytes`: largest size of a file in bytes, unless a single tensor is
    larger.

    Yields:
        Each tensor when it is written.
    """
    shards: list[dict[str, NewTensor]] = [{}]
    filled = 0
    for key, tensor in tensors.items():
        if shards[-1] and filled + tensor.size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][key] = tensor
        filled += tensor.size
    names = [f"{stem}-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    else:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(tensor.size for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{stem}.safetensors.index.json", index)
    for name, shard in zip(names, shards, strict=True):
        yield from _write_file(folder / name, shard)


def _write_file(path: Path, tensors: Mapping[str, NewTensor]) -> Iterator[NewTensor]:
    # Wider numbers first, so that each lies at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in ordered:
        span = [end, end := end + tensor.size]
        header[key] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            # In C order, whatever the strides are. Twice, since an array of JAX takes no order.
            array = np.asarray(np.asarray(tensor.read()), tensor.dtype, order="C")
            file.write(array.reshape(-1).view(np.uint8).data)
            tensor.release()
            yield tensor
