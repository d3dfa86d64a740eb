"""Reading a `.pth` file as `torch.save` writes it since torch 1.6, without torch: arrays are views of the mapped file.

The file is a zip archive of uncompressed members: `data.pkl`, a pickle that describes the objects, and `data/<key>`,
the bytes of each storage (https://docs.pytorch.org/docs/stable/notes/serialization.html). A pickle is a program. Here
it can call only the few functions that describe tensors, and no object that it can obtain has attributes to change.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  registers the names of its dtypes with NumPy
import numpy as np

from verax.checkpoint.formats.safetensors import MappedFile, TensorInfo
from verax.errors import CheckpointError

_DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
"""Dtypes of tensors. torch and NumPy have the same names for them."""

_STORAGES = (
    {"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"}
    | {"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"}
    | {"ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8", "storage.UntypedStorage": "uint8"}
)
"""Dtype of a storage's elements, by the name of its class in the module torch."""

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "ema")
"""Keys under which training scripts put the weights, next to what else they keep."""

_LOCAL_HEADER = 30
"""Bytes before a member's name. The lengths of the name and of the extra field after it are the last two numbers."""

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of a file in the format before torch 1.6: a pickled number."""


class PthFile(MappedFile):
    """An open file: the tensors of its dictionary by key, nested dictionaries' keys joined by dots.

    If the file holds a training state (`{"state_dict": {...}, "epoch": 3}`), its dictionary of weights is taken.
    """

    def __init__(self, path: Path):
        """Map the file and read its description."""
        super().__init__(path)
        if self.map[: len(_LEGACY)] == _LEGACY:
            raise CheckpointError(
                f"{path}: it is in torch's format from before 1.6, which is not supported; write it again with a later "
                "one: torch.save(torch.load(path), path)"
            )
        self._members = self._read_directory()
        order = self._bytes("byteorder") if "byteorder" in self._members else b"little"
        if order not in (b"little", b"big"):
            raise self.fault(f"its byte order is {order[:10]!r}")
        self._swapped = order == b"big"
        try:
            self._tensors = dict(_tensors(_load(path, self._bytes("data.pkl"))))
        except CheckpointError:
            raise
        except Exception as error:  # whatever a program that makes no sense leads to
            raise self.fault(f"its description (data.pkl) cannot be interpreted: {error}") from error
        if not self._tensors:
            raise CheckpointError(f"{path}: no tensors by name in it; expected a dictionary of them")
        self.tensors: dict[str, TensorInfo] = {name: self._place(name, one) for name, one in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in the file, strided as it was saved; a copy if its byte order is not ours."""
        info, strides = self.tensors[name], self._tensors[name].strides
        steps = [step * info.dtype.itemsize for step in strides]
        array = np.ndarray(info.shape, info.dtype, self.view(info.start, info.end), strides=steps)
        if self._swapped and info.dtype.itemsize > 1:
            return array.copy().view(f"u{info.dtype.itemsize}").byteswap().view(info.dtype)
        return array

    def _read_directory(self) -> dict[str, tuple[int, int]]:
        """Byte range of each member, by its name without the archive's."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise self.fault("it is not a sound zip archive, which torch.save writes") from error
        ranges: dict[str, tuple[int, int]] = {}
        for member in members:
            at = member.header_offset
            header = self.map[at : at + _LOCAL_HEADER]
            if header[:4] != b"PK\x03\x04" or len(header) < _LOCAL_HEADER:
                raise self.fault(f"its member {member.filename} is not where its directory says")
            start = at + _LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
            if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
                raise CheckpointError(
                    f"{self.path}: its member {member.filename} is compressed, which torch.save never does"
                )
            if start + member.file_size > self.size:
                raise self.fault(f"its member {member.filename} ends beyond its {self.size} bytes")
            ranges[member.filename.partition("/")[2]] = (start, start + member.file_size)
        if "data.pkl" not in ranges:
            raise CheckpointError(f"{self.path}: a zip archive, but not one of torch.save (it has no data.pkl)")
        return ranges

    def _bytes(self, member: str) -> bytes:
        start, end = self._members[member]
        return self.map[start:end]

    def _place(self, name: str, tensor: _Tensor) -> TensorInfo:
        member = f"data/{tensor.storage.key}"
        if member not in self._members:
            raise self.fault(f"{name} is in {member}, which is missing")
        start, end = self._members[member]
        numbers = (tensor.offset, *tensor.shape, *tensor.strides)
        if not all(type(n) is int and n >= 0 for n in numbers) or len(tensor.shape) != len(tensor.strides):
            raise self.fault(f"the description of {name} is malformed")
        dtype = np.dtype(tensor.kind.dtype)
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
        first = start + tensor.offset * dtype.itemsize
        last = first + (span * dtype.itemsize if math.prod(tensor.shape) else 0)
        if last > end:
            raise self.fault(
                f"{name} of shape {list(tensor.shape)} ends beyond {member}, which has {end - start} bytes"
            )
        return TensorInfo(dtype, tuple(tensor.shape), first, last)


class _Kind(NamedTuple):
    """A dtype, or a class of storages, as its elements' dtype."""

    dtype: str


class _Storage(NamedTuple):
    """A member of the archive."""

    kind: _Kind
    key: str


class _Tensor(NamedTuple):
    """Part of a storage; offset and strides in elements."""

    storage: _Storage
    kind: _Kind
    offset: int
    shape: Sequence[int]
    strides: Sequence[int]


class _Function(NamedTuple):
    """A function that the pickle may call, by its name there. Unlike a Python function it has nothing to assign to."""

    name: str

    def __call__(self, *arguments: Any) -> Any:
        return _FUNCTIONS[self.name](*arguments)


class _OrderedDict(dict):
    """A state_dict without its attributes, which are the versions of its modules."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Ignore attributes."""


def _rebuild(storage: Any, kind: Any, offset: Any, shape: Any, strides: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or not isinstance(kind, _Kind):
        raise ValueError("a tensor without a storage or dtype")
    return _Tensor(storage, kind, offset, tuple(shape), tuple(strides))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": lambda storage, *place: _rebuild(storage, storage.kind, *place),
    "torch._utils._rebuild_tensor_v2": lambda storage, *place: _rebuild(storage, storage.kind, *place[:3]),
    "torch._utils._rebuild_tensor_v3": lambda storage, *place: _rebuild(storage, place[5], *place[:3]),
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "collections.OrderedDict": lambda items=(): _OrderedDict(items),
    "torch.Size": tuple,
}
_KINDS = {
    **{f"torch.{dtype}": _Kind(dtype) for dtype in _DTYPES.split()},
    **{f"torch.{name}": _Kind(dtype) for name, dtype in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Pickle's own reader, with nothing to call but `_FUNCTIONS`."""

    def __init__(self, path: Path, program: bytes):
        super().__init__(io.BytesIO(program), encoding="latin-1")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        """A function or dtype of the short list, by its name."""
        full = f"{module}.{name}"
        if full not in _FUNCTIONS and full not in _KINDS:
            raise _refusal(self.path, full)
        return _KINDS.get(full) or _Function(full)

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a reference names; its bytes stay in the file."""
        name, kind, key, *_ = pid
        if name != "storage" or not isinstance(kind, _Kind) or not isinstance(key, str):
            raise ValueError(f"it refers to {name}")
        return _Storage(kind, key)


def _load(path: Path, program: bytes) -> Any:
    """The value that a pickle describes."""
    for opcode, argument, _ in pickletools.genops(program):
        # EXT: what a process has cached for these codes bypasses `find_class`.
        if opcode.name.startswith(("EXT", "NEWOBJ")):
            raise _refusal(path, f"pickle's instruction {opcode.name}")
        if "PUT" in opcode.name and (argument or 0) > len(program):  # the reader allocates places up to this number
            raise ValueError(f"its memo has a place {argument}")
    return _Unpickler(path, program).load()


def _refusal(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: it asks for {what}, and was not read further: only tensors and plain values are, since "
        "anything else could run code; save the model's state_dict() alone"
    )


def _tensors(content: Any) -> Iterator[tuple[str, _Tensor]]:
    """The tensors of the dictionary that holds the weights, by name."""
    if isinstance(content, Mapping) and not any(isinstance(value, _Tensor) for value in content.values()):
        content = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), content)
    todo = [("", content)]
    seen: set[int] = set()
    while todo:  # not by recursion: a file may nest as deep as it likes, or a dictionary in itself
        prefix, value = todo.pop()
        if isinstance(value, _Tensor):
            yield prefix, value
        elif isinstance(value, Mapping) and id(value) not in seen:
            seen.add(id(value))
            todo.extend((f"{prefix}.{key}" if prefix else str(key), one) for key, one in reversed([*value.items()]))
