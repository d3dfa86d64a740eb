"""GGUF files, memory-mapped: llama.cpp's format of weights, configuration and tokenizer in one file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's reader makes an array of each
string of the vocabulary (10 s and 500 MB for 150,000 tokens), and keeps the pages of weights. Its table of types and
its `dequantize`, the numpy form of llama.cpp's own, are used here.

Matrices of the block types that `ops.linear` multiplies, the embeddings among them, keep
their blocks (`BlockQuantizedWeight`). Experts lie in stacks, which are read matrix by matrix: of types Q8_0, Q4_0 and
MXFP4 as the same integers. Other block types are dequantised while they are read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np

from verax.checkpoint.formats.gguf_config import (
    LONGROPE_FACTORS,
    ROPE_DIVISORS,
    delta_rows,
    grouped_by_key,
    is_zero_centered,
    next_token_layers,
    read_config,
    restored,
    rotated,
    tensor_key,
)
from verax.checkpoint.formats.quantized import GGML_KINDS, QuantizedEntry, from_ggml
from verax.checkpoint.formats.safetensors import MappedFile, TensorInfo
from verax.errors import CheckpointError
from verax.fields import MAX_DEPTH
from verax.files import JsonObject
from verax.ops.block_quantized import BLOCK_KINDS, BlockQuantizedWeight

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
BLOCKS += ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS")
BLOCKS += ("TQ1_0", "TQ2_0", "MXFP4")
"""Types of 32 or 256 values that share scales."""

_VERSIONS = (2, 3)
_ALIGNMENT = 32
"""Alignment of the tensors in bytes, where the file has no `general.alignment`."""

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
        """Map the file and read its header."""
        super().__init__(path)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, ValueError, KeyError, OverflowError) as error:
            raise self.fault(f"its header is malformed ({error})") from error

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
            if key in self.metadata:
                raise self.fault(f"{key} is there twice")
            self.metadata[key] = self._value(self._kind())
        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment.bit_count() != 1:
            raise ValueError(f"general.alignment {alignment!r}, which is not a power of two")
        begin = -(-self._at // alignment) * alignment
        self.tensors = {}
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


_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Names that llama-gguf-split gives to the parts of a file."""


def part_names(name: str) -> list[str]:
    """Names of all parts of the model of which `name` is one part; the name alone for a whole file."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match['stem']}-{i:05}-of-{match['count']}.gguf" for i in range(1, int(match["count"]) + 1)]


def other_parts(first: GGUFFile) -> list[GGUFFile]:
    """The other parts of a split file, of which this is the first; none of a whole one."""
    path, count = first.path, first.metadata.get("split.count", 1)
    if count in (0, 1):
        return []
    names = part_names(path.name)
    if len(names) != count:
        raise first.fault(f"it is one of {count} parts, but is not named like {path.stem}-00001-of-{count:05}.gguf")
    if first.metadata.get("split.no") != 0 or path.name != names[0]:
        raise CheckpointError(f"{path}: one of {count} parts; name the first one, {names[0]}")
    others = [GGUFFile(path.with_name(name)) for name in names[1:]]
    for number, part in enumerate(others, start=1):
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise part.fault(f"it is not part {number + 1} of {count}")
    total = sum(len(part.tensors) for part in (first, *others))
    if first.metadata.get("split.tensors.count", total) != total:
        raise first.fault(f"its parts have {total} tensors, not {first.metadata['split.tensors.count']}")
    return others


class SplitGGUF(GGUFFile):
    """Tensors of a GGUF file, or of the parts of a split one, each with the part that has it."""

    def __init__(self, path: Path):
        """Open the file, or the first file of several, and the others with it."""
        super().__init__(path)
        self._places: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
        for part in (self, *other_parts(self)):
            for name, tensor in part.tensors.items():
                try:
                    weights = self._weights_of(name, tensor)
                except ValueError as error:
                    raise part.fault(f"{name} of shape {list(tensor.shape)} has another form by its name") from error
                for key, own in weights:
                    if key in self._places:
                        raise part.fault(f"{name} is there twice")
                    self._places[key] = part, own

    def _weights_of(self, name: str, tensor: GGUFTensor) -> Iterable[tuple[str, GGUFTensor]]:
        """Weights of a tensor of the file, by their keys."""
        return [(name, tensor)]

    def kind(self, name: str) -> str:
        """Type of a tensor."""
        return self._places[name][1].kind

    def read_rows(self, name: str) -> np.ndarray:
        """The bytes of each row of a tensor, uint8 `[F, bytes]`."""
        part, tensor = self._places[name]
        return part.view(tensor.start, tensor.end).reshape(tensor.shape[0], -1)

    def _pieces(self, name: str) -> list[tuple[GGUFFile, GGUFTensor]]:
        return [self._places[name]]

    def places(self, name: str) -> list[tuple[Path, int, int]]:
        """File, first byte and end of each piece of a tensor."""
        return [(part.path, tensor.start, tensor.end) for part, tensor in self._pieces(name)]

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory."""
        for part, tensor in self._pieces(name):
            part.release_pages(tensor.start, tensor.end)


class GGUFWeights(SplitGGUF):
    """The language model of a GGUF file, or of the parts of a split one: configuration, and weights by their keys."""

    def __init__(self, path: Path):
        """Open the file."""
        super().__init__(path)
        self._halves: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
        """Second half of a weight whose rows alternate between two tensors."""
        if self._architecture != "phi3":
            self._split_attention()
        if self._architecture == "gpt-oss":
            self._join_halves()
        if self._architecture == "qwen3next":
            self._split_fused()
        divisors = self._places.pop(ROPE_DIVISORS, None)
        factors = {key: self._places.pop(name, None) for name, key in LONGROPE_FACTORS.items()}
        numbers: Callable[..., Any] = lambda place: place[0].view(*place[1][2:]).view(np.float32)
        for key, (part, tensor) in self._places.items():
            if key.endswith("shared_expert_gate.weight"):  # of one output, which the file leaves out
                self._places[key] = part, tensor._replace(shape=(1, tensor.shape[-1]))
        stored = {key: tensor for key, (_, tensor) in self._places.items()}
        try:
            self.config = read_config(
                self.metadata,
                {key: tensor.shape for key, tensor in stored.items()},
                None if divisors is None else numbers(divisors),
                {key: numbers(place).tolist() for key, place in factors.items() if place is not None},
            )
        except KeyError as error:
            raise CheckpointError(f"{path}: {error.args[0]} is missing: this is not a language model") from error
        floats = np.dtype(np.float32)
        self.tensors: dict[str, Any] = {
            key: TensorInfo(DTYPES.get(tensor.kind, floats), _own_shape(key, tensor.shape), tensor.start, tensor.end)
            for key, tensor in stored.items()
        }
        self.packed = {
            key: entry(path, key, kind, (shape[0], shape[1]))
            for key, (kind, shape, *_) in stored.items()
            for kinds, entry in [_EXPERTS_AS_STORED if ".experts." in key else _AS_STORED]
            if kind in kinds and len(shape) == 2 and not self._splits_blocks(key, kind)
        }

    @property
    def _architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @cached_property
    def _predicting(self) -> tuple[str, ...]:
        """Beginnings of the names of layers that predict further tokens, which are not read."""
        count, depth = next_token_layers(self.metadata), self.metadata.get(f"{self._architecture}.block_count")
        return tuple(f"blk.{depth - 1 - i}." for i in range(min(count, MAX_DEPTH))) if isinstance(depth, int) else ()

    def _weights_of(self, name: str, tensor: GGUFTensor) -> Iterable[tuple[str, GGUFTensor]]:
        if name.startswith(self._predicting):
            return []
        return _single_experts(name if name == ROPE_DIVISORS else tensor_key(name, self._architecture), tensor)

    def _splits_blocks(self, key: str, kind: str) -> bool:
        """True if a block has inputs of two value heads of a hybrid, whose heads change places."""
        block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        is_output = key.endswith("linear_attn.out_proj.weight") and self._architecture != "qwen3next"
        return is_output and self.config["linear_value_head_dim"] % block != 0

    def _join_halves(self) -> None:
        """Make one weight of gate and up of a gpt-oss's experts: their outputs alternate in ours."""
        for key in [key for key in self._places if ".experts." in key and "gate_proj" in key]:
            (part, gate), up = self._places.pop(key), self._places.pop(key.replace("gate_proj", "up_proj"), None)
            if up is None or up[1][:2] != gate[:2]:
                raise part.fault(f"{key} has no up_proj of its type and shape with it")
            joined = key.replace("gate_proj", "gate_up_proj")
            axis = len(gate.shape) - 1 if key.endswith("_bias") else 0
            shape = tuple(size * 2 if i == axis else size for i, size in enumerate(gate.shape))
            self._places[joined], self._halves[joined] = (part, gate._replace(shape=shape)), up

    def _split_attention(self) -> None:
        """Make three weights or biases of the queries', keys' and values' that the converter joined (`--fuse-qkv`)."""
        for key in [key for key in self._places if re.search(r"\.(qkv_proj|in_proj_qkv)\.\w+$", key)]:
            layer, kind = re.split(r"\.(?:self|linear)_attn\.\w+\.", key)
            (part, fused), output = self._places[key], self._places.get(f"{layer}.self_attn.o_proj.weight")
            if output is None:  # a delta layer, whose projection is one in ours too
                continue
            queries = output[1].shape[-1] * (2 if "in_proj_qkv" in key else 1)  # with the gates of a hybrid's outputs
            if queries >= fused.shape[0]:
                raise part.fault(f"{key} has {fused.shape[0]} rows, and queries alone {queries}")
            sizes = {"q": queries, **dict.fromkeys("kv", (fused.shape[0] - queries) // 2)}
            row, start = (fused.end - fused.start) // fused.shape[0], fused.start
            del self._places[key]
            for name, size in sizes.items():
                end = start + size * row
                own = GGUFTensor(fused.kind, (size, *fused.shape[1:]), start, end)
                self._places[f"{layer}.self_attn.{name}_proj.{kind}"], start = (part, own), end

    def _split_fused(self) -> None:
        """Make two weights of a Qwen3-Next's projection of b and a, each with half of its rows."""
        for key in [key for key in self._places if key.endswith("in_proj_ba.weight")]:
            part, tensor = self._places.pop(key)
            for name in ("in_proj_b", "in_proj_a"):
                half = tensor._replace(shape=(tensor.shape[0] // 2, *tensor.shape[1:]))
                self._places[key.replace("in_proj_ba", name)] = part, half

    def read(self, name: str) -> np.ndarray:
        """A tensor as floats, a view where the file has the same numbers; of a quantised weight, its blocks.

        Rows are in transformers' order. Blocks are `uint8 [F, bytes of a row]`.
        """
        part, (kind, shape, start, end) = self._places[name]
        if name in self._halves:
            other, (_, _, *ends) = self._halves[name]
            halves = part.view(start, end), other.view(*ends)
            if name.endswith("_bias"):
                return np.stack([half.view(DTYPES[kind]) for half in halves], axis=-1).reshape(shape)
            rows = np.stack([half.reshape(shape[0] // 2, -1) for half in halves], axis=1).reshape(shape[0], -1)
        elif self._architecture == "qwen3next" and name.endswith(_FUSED):
            keys = self.config["linear_num_key_heads"]  # each with its rows of b, then its rows of a
            by_key = part.view(start, end).reshape(keys, 2, shape[0] // keys, -1)
            rows = by_key[:, _FUSED.index(name.rpartition("linear_attn.")[2])].reshape(shape[0], -1)
        else:
            rows = self.read_rows(name)
        if (heads := rotated(name, self.config)) is not None:
            rows = restored(rows, heads)
        if ".linear_attn." in name:
            return self._delta_weight(name, rows)
        if name in self.packed:
            return rows
        if kind in DTYPES:
            weight = rows.view(DTYPES[kind]).reshape(shape)
            # llama.cpp's converter adds 1 to the norms of a Gemma, which multiply by 1 + weight.
            return weight - 1 if is_zero_centered(self._architecture) and name.endswith("norm.weight") else weight
        return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(shape)

    def _delta_weight(self, name: str, rows: np.ndarray) -> np.ndarray:
        """`read` of a weight of a delta layer. Value heads are in another order in a Qwen3.5's file."""
        kind, shape, *_ = self._places[name][1]
        is_dealt = self._architecture != "qwen3next"
        rows = delta_rows(name, rows, self.config) if is_dealt else rows
        is_output = is_dealt and name.endswith("out_proj.weight")
        if name in self.packed:  # whole blocks of inputs change places
            return grouped_by_key(rows, self.config, 1) if is_output else rows
        known = gguf.GGMLQuantizationType[kind]
        floats = (rows.view(DTYPES[kind]) if kind in DTYPES else gguf.dequantize(rows, known)).reshape(shape)
        if name.endswith("A_log"):
            return np.log(-floats)
        if name.endswith("conv1d.weight"):
            return floats.reshape(shape[0], 1, -1)
        return grouped_by_key(floats, self.config, 1) if is_output else floats

    def _pieces(self, name: str) -> list[tuple[GGUFFile, GGUFTensor]]:
        return [self._places[name], *([self._halves[name]] if name in self._halves else [])]

    def generation_config(self) -> JsonObject:
        """The sampling that the file recommends, by generation_config.json's names, and tokens never to be drawn."""
        names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
        names |= {name: name for name in ("top_k", "top_p", "min_p", "mirostat", "xtc_probability")}
        if self.metadata.get("general.sampling.penalty_last_n") == 0:  # of no tokens
            del names["penalty_repeat"]
        given = {ours: self.metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
        given["suppress_tokens"] = self.metadata.get("tokenizer.ggml.suppress_tokens")
        return JsonObject({name: value for name, value in given.items() if value is not None}, self.path)


_FUSED = ("in_proj_b.weight", "in_proj_a.weight")
"""Weights that are one in a Qwen3-Next's file."""


def block_entry(path: Path, key: str, kind: str, shape: tuple[int, int]) -> QuantizedEntry:
    """Description of a matrix of a type out of `BLOCK_KINDS`, which is read as its rows of blocks."""
    held = BlockQuantizedWeight.shapes(kind, *shape)
    convert = lambda **rows: BlockQuantizedWeight.from_blocks(kind, *rows.values())
    return QuantizedEntry(path, (key,), shape, kind, convert, held)


def _integer_entry(path: Path, key: str, kind: str, shape: tuple[int, int]) -> QuantizedEntry:
    return QuantizedEntry(path, (key,), shape, kind, lambda **rows: from_ggml(kind, *rows.values()))


_AS_STORED, _EXPERTS_AS_STORED = (tuple(BLOCK_KINDS), block_entry), (GGML_KINDS, _integer_entry)
"""Types of matrices that are not dequantised, and the function that describes one of them."""


def _own_shape(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a weight as our models have it."""
    return (shape[0], 1, shape[1]) if key.endswith("linear_attn.conv1d.weight") else shape


def _single_experts(key: str, tensor: GGUFTensor) -> list[tuple[str, GGUFTensor]]:
    """A tensor by its key; of a stack of experts, each matrix by its own."""
    if "{}" not in key:
        return [(key, tensor)]
    parts = ("gate_proj", "up_proj") if "gate_up_proj" in key else ("",)  # of each expert, one below the other
    count, rows, *row = tensor.shape
    size = (tensor.end - tensor.start) // (count * len(parts))
    names = (key.format(i).replace("gate_up_proj", part) for i in range(count) for part in parts)
    starts = range(tensor.start, tensor.end, size)
    matrix = tensor.kind, (rows // len(parts), *row)
    return [(name, GGUFTensor(*matrix, at, at + size)) for name, at in zip(names, starts, strict=True)]
