"""Reading a `.pth` file as `torch.save` writes it since torch 1.6: no torch, no pickled code run, arrays mapped.

The file is a zip archive whose members are stored as they are: `data.pkl`, a pickle that describes the objects, and
`data/<key>`, the bytes of each storage (https://docs.pytorch.org/docs/stable/notes/serialization.html). The pickle is a
small program. It is run here by an interpreter of its own that knows the instructions for plain values and the few
functions that describe tensors, and stops at anything else.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from verax.checkpoint.formats.safetensors import MappedFile, TensorInfo
from verax.errors import CheckpointError

__all__ = ["PthFile"]

_DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint64": np.dtype(np.uint64),
    "uint32": np.dtype(np.uint32),
    "uint16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
"""By torch's names."""

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
"""Dtype of a storage's elements, by the name of its class."""

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "ema")
"""Under these keys training scripts put the weights, beside what else they keep."""

_LOCAL_HEADER = 30
"""Bytes before a member's name; the lengths of the name and of what follows it are its last two numbers."""

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of a file in the format before torch 1.6: a pickled number."""


class PthFile(MappedFile):
    """An open file: the tensors of its dictionary by key, nested dictionaries' keys joined by dots.

    A dictionary of weights inside one (`{"state_dict": {...}, "epoch": 3}`) is taken for the whole.
    """

    def __init__(self, path: Path):
        """Map the file and interpret its description.

        Raises:
            CheckpointError: if the file is missing, damaged, of the format before torch 1.6, without tensors, or holds
                anything that is not a tensor or a plain value; with its name.
        """
        super().__init__(path)
        if self.map[: len(_LEGACY)] == _LEGACY:
            raise CheckpointError(
                f"{path}: it is in torch's format from before 1.6, which is not supported; write it anew with a later "
                "one: torch.save(torch.load(path), path)"
            )
        self._members = self._read_directory()
        order = self._bytes("byteorder") if "byteorder" in self._members else b"little"
        if order not in (b"little", b"big"):
            raise self.fault(f"its byte order is {order[:10]!r}")
        self._swapped = order == b"big"
        try:
            content = _Machine(path).run(self._bytes("data.pkl"))
        except CheckpointError:
            raise
        except Exception as error:  # whatever a program that makes no sense leads to
            raise self.fault(f"its description (data.pkl) cannot be interpreted: {error}") from error
        self._tensors = {name: tensor for name, tensor in _weights(content) if isinstance(tensor, _Tensor)}
        if not self._tensors:
            raise CheckpointError(f"{path}: no tensors by name in it; expected a dictionary of them")
        self.tensors: dict[str, TensorInfo] = {name: self._place(name, one) for name, one in self._tensors.items()}

    def kind(self, name: str) -> str:
        """A tensor's dtype."""
        return str(self.tensors[name].dtype)

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in the file, strided as it was saved; a copy if its byte order is not ours."""
        info, strides = self.tensors[name], self._tensors[name].strides
        steps = [step * info.dtype.itemsize for step in strides]
        array = np.ndarray(info.shape, info.dtype, self.view(info.start, info.end), strides=steps)
        if self._swapped and info.dtype.itemsize > 1:
            return array.copy().view(f"u{info.dtype.itemsize}").byteswap().view(info.dtype)
        return array

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory. No view loses anything: a page that is touched again is mapped again."""
        info = self.tensors[name]
        self.release_pages(info.start, info.end)

    def _read_directory(self) -> dict[str, tuple[int, int]]:
        """Byte range of each member, by its name without the archive's."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise self.fault("it is no sound zip archive, which torch.save writes") from error
        found: dict[str, tuple[int, int]] = {}
        for member in members:
            at = member.header_offset
            header = self.map[at : at + _LOCAL_HEADER]
            if header[:4] != b"PK\x03\x04" or len(header) < _LOCAL_HEADER:
                raise self.fault(f"its member {member.filename} is not where its directory says")
            start = at + _LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
            if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
                raise CheckpointError(
                    f"{self.path}: its member {member.filename} is compressed; torch.save writes none"
                )
            if start + member.file_size > self.size:
                raise self.fault(f"its member {member.filename} ends beyond its {self.size} bytes")
            found[member.filename.partition("/")[2]] = (start, start + member.file_size)
        if "data.pkl" not in found:
            raise CheckpointError(f"{self.path}: a zip archive, but not one of torch.save (it has no data.pkl)")
        return found

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
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
        size = tensor.dtype.itemsize
        first = start + tensor.offset * size
        last = first + (span * size if math.prod(tensor.shape) else 0)
        if last > end:
            raise self.fault(
                f"{name} of shape {list(tensor.shape)} ends beyond {member}, which has {end - start} bytes"
            )
        return TensorInfo(tensor.dtype, tuple(tensor.shape), first, last)


class _Storage(NamedTuple):
    """A member of the archive."""

    dtype: np.dtype[Any]
    key: str


class _Tensor(NamedTuple):
    """Part of a storage; offset and strides in elements."""

    storage: _Storage
    dtype: np.dtype[Any]
    offset: int
    shape: Sequence[int]
    strides: Sequence[int]


class _Dict(dict):
    """A dictionary of the pickle, ordered or not."""


def _rebuild_tensor(storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any) -> _Tensor:
    return _Tensor(storage, storage.dtype, offset, shape, strides)


def _rebuild_tensor_v3(
    storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], _grad: Any, _hooks: Any, kind: Any
) -> _Tensor:
    return _Tensor(storage, kind, offset, shape, strides)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "collections.OrderedDict": lambda items=(): _Dict(items),
    "torch.Size": tuple,
}
"""All that a file may call, by the name that it has there."""

_CONSTANTS: dict[str, Any] = {
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
    **{f"torch.{name}": _DTYPES[dtype] for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": _DTYPES["uint8"],
}
"""Other names that a file may contain: a dtype, or a storage's class, which becomes its elements' dtype."""


class _Global(NamedTuple):
    """A function of `_FUNCTIONS`, named and not yet called."""

    name: str


_MARK = object()
_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": _Dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "INT", "LONG", "FLOAT"} | {
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING", "BINBYTES", "SHORT_BINBYTES"
}  # fmt: skip
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_NOTHING = {"PROTO", "FRAME"}


class _Machine:
    """A stack machine for the part of pickle's language that torch.save uses."""

    def __init__(self, path: Path):
        self.path = path
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        """The value that a pickle describes."""
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._step(opcode.name, argument)
        raise ValueError("it does not end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _VALUES:
            stack.append(_VALUES[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _PUTS:
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in _GETS:
            stack.append(self.memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _SHORT_TUPLES:
            stack.append(tuple(self._pop(_SHORT_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif name in ("APPEND", "APPENDS"):
            values = self._pop(1) if name == "APPEND" else self._pop_to_mark()
            self._top(list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = self._pop(2) if name == "SETITEM" else self._pop_to_mark()
            self._top(_Dict).update(zip(values[::2], values[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(self._global(argument if name == "GLOBAL" else " ".join(self._pop(2))))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            function, arguments = self._pop(2)
            if not isinstance(function, _Global):
                raise ValueError(f"it calls {type(function).__name__}")
            stack.append(_FUNCTIONS[function.name](*arguments))
        elif name == "BUILD":
            stack.pop()  # attributes of a state_dict: the versions of its modules
            self._top(_Dict)
        elif name not in _NOTHING:
            raise self._refusal(f"pickle's instruction {name}")

    def _global(self, argument: str) -> Any:
        name = argument.replace(" ", ".")
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name not in _FUNCTIONS:
            raise self._refusal(name)
        return _Global(name)

    def _top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"it fills a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("its stack is empty")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _pop_to_mark(self) -> list[Any]:
        at = next(i for i in reversed(range(len(self.stack))) if self.stack[i] is _MARK)
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: it asks for {what}, and was not read further: only tensors and plain values are, since "
            "anything else could run code; save the model's state_dict() alone"
        )


def _storage(reference: Any) -> _Storage:
    kind, dtype, key, *_ = reference
    if kind != "storage" or not isinstance(dtype, np.dtype) or not isinstance(key, str):
        raise ValueError(f"it refers to {kind}")
    return _Storage(dtype, key)


def _weights(content: Any) -> Iterator[tuple[str, Any]]:
    """The named values of the dictionary that holds the weights."""
    if isinstance(content, Mapping) and not any(isinstance(value, _Tensor) for value in content.values()):
        content = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), content)
    todo = [("", content)]
    seen: set[int] = set()
    while todo:  # not by recursion: a file may nest as deep as it likes, or a dictionary in itself
        prefix, value = todo.pop()
        if not isinstance(value, Mapping):
            yield prefix, value
        elif id(value) not in seen:
            seen.add(id(value))
            todo.extend((f"{prefix}.{key}" if prefix else str(key), one) for key, one in reversed([*value.items()]))
