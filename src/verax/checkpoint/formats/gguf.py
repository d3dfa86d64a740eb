"""GGUF files, memory-mapped: llama.cpp's format of weights, configuration and tokenizer in one file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's reader makes an array of each
string of the vocabulary (10 s and 500 MB for 150,000 tokens), and keeps the pages of weights. Its table of types and
its `dequantize`, the numpy form of llama.cpp's own, are used here.

Names of tensors, order of their rows and config.json as metadata follow llama.cpp's converter
(`convert_hf_to_gguf.py`). Matrices of the block types that `ops.linear` multiplies, the embeddings among them, keep
their blocks (`BlockQuantizedWeight`). Other block types are dequantised while they are read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np

from verax.checkpoint.formats.quantized import QuantizedEntry
from verax.checkpoint.formats.safetensors import MappedFile, TensorInfo
from verax.errors import CheckpointError, UnsupportedModelError
from verax.ops.block_quantized import BLOCK_KINDS, BlockQuantizedWeight

__all__ = [
    "DTYPES",
    "ROPE_DIVISORS",
    "GGUFFile",
    "GGUFWeights",
    "interleaved",
    "read_config",
    "restored",
    "rotated",
    "tensor_name",
]

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
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
        """Map the file and read its header.

        Raises:
            CheckpointError: if the file is missing, damaged, or of a version or type that is not supported.
        """
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
            self.metadata[key] = self._value(self._kind())
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{self.path}: one of {self.metadata['split.count']} parts; join them first: llama-gguf-split --merge"
            )
        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
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


_MODEL_TYPES = {"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama", "gemma3": "gemma3_text", "gemma2": "gemma2"}
"""config.json's `model_type` by `general.architecture`, for those that are supported."""

_GEMMA = ("gemma3", "gemma2")

ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, `[H/2]`: the file's form of Llama 3.1's scaling."""

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_KEYS = {key: name for name, key in _NAMES.items()}
_LAYER_KEYS = {key: name for name, key in _LAYER_NAMES.items()}


def tensor_key(name: str, architecture: str | None) -> str:
    """The checkpoint's key of a tensor, such as `blk.3.attn_q.weight`; the name itself if our models lack it.

    `architecture` is the file's `general.architecture`.
    """
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    names = _GEMMA_LAYER_NAMES if architecture in _GEMMA else _LAYER_NAMES
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    return f"model.layers.{layer}.{names[part]}.{kind}" if block == "blk" and part in names else name


def tensor_name(key: str) -> str:
    """The name of the tensor that holds the weight `key` of a Qwen3, Qwen2 or Llama: the inverse of `tensor_key`."""
    stem, _, kind = key.rpartition(".")
    if stem in _KEYS:
        return f"{_KEYS[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_KEYS[part]}.{kind}"


def norm_offset(key: str, architecture: str) -> float:
    """The number that llama.cpp's converter adds to a weight: 1 to a Gemma's norms, which multiply by 1 + weight."""
    return 1.0 if architecture in _GEMMA and key.endswith("norm.weight") else 0.0


def rotated(key: str, config: Mapping[str, Any]) -> int | None:
    """The heads of a weight or bias whose rows are interleaved in the file; None if its rows are in our order.

    llama.cpp rotates neighbours in a Llama's heads, where transformers rotates halves, so that its converter moves the
    rows of the query and key projections. In the Qwen models it rotates halves.
    """
    if config["model_type"] != "llama":
        return None
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = key.split(".")[-2]
    return config[heads[part]] if part in heads else None


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows `[heads * H, ...]` with each head's halves interleaved: as a Llama's file has them."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def restored(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleaved`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def read_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], divisors: Any = None
) -> dict[str, Any]:
    """Contents of the equivalent config.json.

    Args:
        metadata: the file's keys and values.
        shapes: shapes of the tensors, by their keys in a checkpoint.
        divisors: the file's `ROPE_DIVISORS`, if it has some.

    Raises:
        UnsupportedModelError: for an architecture or a feature that verax does not have; naming it.
        KeyError: with the metadata key that is missing.
    """
    kind = metadata["general.architecture"]
    if not isinstance(kind, str) or kind not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"general.architecture {kind!r} is not supported; in GGUF files {', '.join(_MODEL_TYPES)} are"
        )

    def given(name: str, default: Any = None) -> Any:
        return metadata.get(f"{kind}.{name}", default)

    def needed(name: str) -> int:
        value = metadata[f"{kind}.{name}"]
        if not isinstance(value, int):
            raise UnsupportedModelError(f"{kind}.{name}: expected one number for all layers, got {value!r}")
        return value

    heads, size = needed("attention.head_count"), needed("embedding_length")
    head_dim = given("attention.key_length", size // heads)
    for name, wanted in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim), ("expert_count", 0)):
        if given(name, wanted) != wanted:
            raise UnsupportedModelError(f"{kind}.{name} {given(name)} is not supported; {wanted} is")
    if kind not in _GEMMA and given("attention.sliding_window"):
        raise UnsupportedModelError(
            f"{kind}.attention.sliding_window {given('attention.sliding_window')} is not supported"
        )
    return {
        "model_type": _MODEL_TYPES[kind],
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": size,
        "intermediate_size": needed("feed_forward_length"),
        "num_hidden_layers": needed("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": needed("attention.head_count_kv") if given("attention.head_count_kv") else heads,
        "head_dim": head_dim,
        "rms_norm_eps": metadata[f"{kind}.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": needed("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        "rope_theta": given("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(given, kind, divisors),
        **(_gemma(given, kind, heads, size, head_dim) if kind in _GEMMA else {}),
    }


_WINDOW_PATTERN = {"gemma3": 6, "gemma2": 2}
"""Layers from one that sees everything to the next, where the file does not say."""

_WIDE_QUERIES = {("gemma3", 62), ("gemma2", 46)}
"""Models (of 27 billion weights) whose scores are scaled by width / heads and not by the head size, by their depth."""


def _gemma(given: Callable[..., Any], kind: str, heads: int, size: int, head_dim: int) -> dict[str, Any]:
    """Fields of a Gemma's config.json alone. llama.cpp knows by a model's depth what no metadata say."""
    depth, pattern = given("block_count"), given("attention.sliding_window_pattern", _WINDOW_PATTERN[kind])
    window = given("attention.sliding_window", 4096 if kind == "gemma2" else None)
    if isinstance(pattern, int):
        pattern = [pattern == 0 or (i + 1) % pattern != 0 for i in range(depth)]
    elif not isinstance(pattern, list):
        raise UnsupportedModelError(f"{kind}.attention.sliding_window_pattern: expected a number, got {pattern!r}")
    caps = {name: given(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {
        "layer_types": ["sliding_attention" if window and windowed else "full_attention" for windowed in pattern],
        "sliding_window": window or None,
        "rope_local_base_freq": given("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": size // heads if (kind, depth) in _WIDE_QUERIES else head_dim,
        **{name: cap for name, cap in caps.items() if cap is not None},
    }


_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _rope_scaling(given: Any, kind: str, divisors: Any) -> dict[str, Any] | None:
    if divisors is not None:
        return {"rope_type": "divided", "divisors": [float(divisor) for divisor in divisors]}
    scaling = given("rope.scaling.type", "none")
    if scaling == "none":
        return None
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if given(f"rope.scaling.{name}", 1.0) != 1.0:
            raise UnsupportedModelError(f"{kind}.rope.scaling.{name} is not supported")
    numbers = {ours: given(f"rope.scaling.{theirs}") for theirs, ours in _SCALING.items()}
    return {"rope_type": scaling, **{name: number for name, number in numbers.items() if number is not None}}


class GGUFWeights(GGUFFile):
    """The language model of a GGUF file: configuration, and weights by their keys in a folder."""

    def __init__(self, path: Path):
        """Open the file.

        Raises:
            CheckpointError: if it is damaged, has no language model, or tensors of a type that is not supported.
            UnsupportedModelError: for an architecture that verax does not have.
        """
        super().__init__(path)
        architecture = str(self.metadata.get("general.architecture"))
        divisors = self.tensors.pop(ROPE_DIVISORS, None)
        self._stored = {tensor_key(name, architecture): tensor for name, tensor in self.tensors.items()}
        try:
            self.config = read_config(
                self.metadata,
                {key: tensor.shape for key, tensor in self._stored.items()},
                None if divisors is None else self.view(*divisors[2:]).view(np.float32),
            )
        except KeyError as error:
            raise CheckpointError(f"{path}: {error.args[0]} is missing: this is not a language model") from error
        floats = np.dtype(np.float32)
        self.tensors: dict[str, Any] = {
            key: TensorInfo(DTYPES.get(tensor.kind, floats), *tensor[1:]) for key, tensor in self._stored.items()
        }
        self.packed = {
            key: QuantizedEntry(path, (key,), (shape[0], shape[1]), kind, partial(_from_blocks, kind))
            for key, (kind, shape, *_) in self._stored.items()
            if kind in BLOCK_KINDS and len(shape) == 2
        }

    def kind(self, name: str) -> str:
        """Type of a tensor."""
        return self._stored[name].kind

    def read(self, name: str) -> np.ndarray:
        """A tensor as floats, a view where the file has the same numbers; of a quantised weight, its blocks.

        Rows are in transformers' order. Blocks are `uint8 [F, bytes of a row]`.
        """
        kind, shape, start, end = self._stored[name]
        rows = self.view(start, end).reshape(shape[0], -1)
        if (heads := rotated(name, self.config)) is not None:
            rows = restored(rows, heads)
        if name in self.packed:
            return rows
        if kind in DTYPES:
            weight = rows.view(DTYPES[kind]).reshape(shape)
            offset = norm_offset(name, self.metadata["general.architecture"])
            return weight - offset if offset else weight
        return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(shape)

    def generation_config(self) -> dict[str, float]:
        """The sampling that the file recommends, by generation_config.json's names."""
        names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        names["penalty_repeat"] = "repetition_penalty"
        given = {ours: self.metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
        return {name: value for name, value in given.items() if value is not None}


def _from_blocks(kind: str, **rows: np.ndarray) -> BlockQuantizedWeight:
    return BlockQuantizedWeight.from_blocks(kind, *rows.values())
