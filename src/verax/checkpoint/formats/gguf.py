"""GGUF files, memory-mapped: llama.cpp's format of weights, configuration and tokenizer in one file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's reader makes an array of each
string of the vocabulary (10 s and 500 MB for 150,000 tokens), and keeps the pages of weights. Its table of types and
its `dequantize`, the numpy form of llama.cpp's own, are used here.

Names of tensors, order of their rows and config.json as metadata follow llama.cpp's converter
(`convert_hf_to_gguf.py`). Matrices of the block types that `ops.linear` multiplies, the embeddings among them, keep
their blocks (`BlockQuantizedWeight`). Experts lie in stacks, which are read matrix by matrix: of types Q8_0, Q4_0 and
MXFP4 as the same integers. Other block types are dequantised while they are read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np

from verax.checkpoint.formats.quantized import GGML_KINDS, QuantizedEntry, from_ggml
from verax.checkpoint.formats.safetensors import MappedFile, TensorInfo
from verax.errors import CheckpointError, UnsupportedModelError
from verax.ops.block_quantized import BLOCK_KINDS, BlockQuantizedWeight
from verax.ops.quantized import QuantizedWeight

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
BLOCKS += ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "MXFP4")
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


_MODEL_TYPES = {
    **{"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama", "gemma3": "gemma3_text", "gemma2": "gemma2"},
    **{"smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "phi3": "phi3"},
    **{"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"},
}
"""config.json's `model_type` by `general.architecture`, for those that are supported."""

_GEMMA = ("gemma3", "gemma2")

ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, `[H/2]`: the file's form of Llama 3.1's scaling."""

LONGROPE_FACTORS = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
"""Keys of config.json's `rope_scaling` by the names of the tensors that hold LongRoPE's divisors."""

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
_EXPERT_NAMES = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
"""Names of a layer's stacks, whose keys are of single experts."""

_OWN_LAYER_NAMES = {
    "qwen3moe": {**_LAYER_NAMES, **_EXPERT_NAMES, "ffn_gate_inp": "mlp.gate"},
    "gpt-oss": {
        **_LAYER_NAMES,
        **_EXPERT_NAMES,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
    },
    **dict.fromkeys((*_GEMMA, "olmo2"), _GEMMA_LAYER_NAMES),
    "phi3": {**_LAYER_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_KEYS = {key: name for name, key in _NAMES.items()}
_LAYER_KEYS = {key: name for name, key in _LAYER_NAMES.items()}


def tensor_key(name: str, architecture: str | None) -> str:
    """The checkpoint's key of a tensor, such as `blk.3.attn_q.weight`; the name itself if our models lack it.

    The key of a stack of experts has `{}` for the number of the expert.

    `architecture` is the file's `general.architecture`.
    """
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    names = _OWN_LAYER_NAMES.get(architecture or "", _LAYER_NAMES)
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in names:
        return name
    key = f"model.layers.{layer}.{names[part]}.{kind}"
    if kind == "bias":  # of a whole stack
        key = re.sub(r"\.experts\.\{\}\.(\w+)\.bias$", r".experts.\1_bias", key)
    return key.removesuffix(".weight") if part == "attn_sinks" else key


def tensor_name(key: str) -> str:
    """The name of the tensor that holds the weight `key` of a Qwen3, Qwen2 or Llama: the inverse of `tensor_key`."""
    stem, _, kind = key.rpartition(".")
    if stem in _KEYS:
        return f"{_KEYS[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_KEYS[part]}.{kind}"


def rotated(key: str, config: Mapping[str, Any]) -> int | None:
    """The heads of a weight or bias whose rows are interleaved in the file; None if its rows are in our order.

    llama.cpp rotates neighbours in the heads of Llama, SmolLM3 and Granite, where transformers rotates halves, so that
    its converter moves the rows of the query and key projections. In the other models it rotates halves.
    """
    if config["model_type"] not in ("llama", "smollm3", "granite"):
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
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    divisors: Any = None,
    longrope: Mapping[str, list[float]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Contents of the equivalent config.json.

    `shapes`: shapes of the tensors, by their keys in a checkpoint. `divisors`: the file's `ROPE_DIVISORS`, if it has
    some. `longrope`: its `LONGROPE_FACTORS`, by config.json's keys.

    Raises:
        UnsupportedModelError: for an architecture or a feature that verax does not have; naming it.
        KeyError: with the metadata key that is missing.
    """
    kind = metadata["general.architecture"]
    if not isinstance(kind, str) or kind not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"general.architecture {kind!r} is not supported; in GGUF files {', '.join(_MODEL_TYPES)} are"
        )

    given: Callable[..., Any] = lambda name, default=None: metadata.get(f"{kind}.{name}", default)

    def needed(name: str) -> int:
        value = metadata[f"{kind}.{name}"]
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"{kind}.{name}: expected one number for all layers, 1 or more, got {value!r}")
        return value

    _check_settings(given, kind)
    heads, size = needed("attention.head_count"), needed("embedding_length")
    head_dim = given("attention.key_length", size // heads)
    partly = kind == "phi3"
    for name in ("attention.value_length", *(() if partly else ("rope.dimension_count",)), *LOCAL_SIZES):
        if given(name, head_dim) != head_dim:
            raise UnsupportedModelError(f"{kind}.{name} {given(name)} is not supported; {head_dim} is")
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
        **(_granite(given, kind, head_dim) if kind == "granite" else {}),
        **(_phi3(given, head_dim, longrope) if kind == "phi3" else {}),
        **(_experts(given, needed, kind) if kind in _MIXTURES else {}),
        **(_olmo3(given, kind, divisors) if kind == "olmo2" and given("attention.sliding_window") else {}),
    }


_MIXTURES = ("qwen3moe", "gpt-oss")


def _experts(given: Callable[..., Any], needed: Callable[[str], int], kind: str) -> dict[str, Any]:
    """Fields about experts, and a gpt-oss's windows and rotation, which are half of what its metadata do not say."""
    width, sizes = needed("expert_feed_forward_length"), {"num_experts_per_tok": needed("expert_used_count")}
    if kind == "qwen3moe":
        experts = {"num_experts": needed("expert_count"), "moe_intermediate_size": width, "norm_topk_prob": True}
        return {**sizes, **experts, "intermediate_size": given("feed_forward_length", width)}
    scaling = _rope_scaling(given, kind, None)
    return {
        **sizes,
        "num_local_experts": needed("expert_count"),
        "intermediate_size": width,
        "sliding_window": given("attention.sliding_window", 128),
        "rope_scaling": {"truncate": False, **(scaling or {"rope_type": "default"})},
    }


READ = frozenset(
    {
        *("context_length", "embedding_length", "block_count", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
)
"""Keys of every architecture that make the configuration, after the architecture's name."""

GEMMA_READ = frozenset(
    {
        *("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
    }
)

OLMO_READ = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})

EXPERTS_READ = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})

GRANITE_READ: Mapping[str, str] = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Keys of config.json by the file's; 0 stands for none."""

OWN_KEYS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(_GEMMA, GEMMA_READ),
    "olmo2": OLMO_READ,
    "granite": frozenset(GRANITE_READ),
    "qwen3moe": EXPERTS_READ,
    "gpt-oss": EXPERTS_READ | {"attention.sliding_window"},
    "phi3": frozenset({"attention.sliding_window", "rope.scaling.attn_factor"}),
}
"""Keys of single architectures that make the configuration."""

LOCAL_SIZES = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
"""Sizes of heads in layers with a window, which equal the sizes in the other layers."""

WITHOUT_EFFECT = frozenset(
    {
        *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.alpha"),
        *("pooling_type", "classifier.pooling_type", "classifier.output_labels"),
        *("expert_used_count", "expert_group_count", "expert_group_used_count"),
    }
)
"""Keys without effect on a language model of these architectures: the embeddings have the size of the vocabulary,
poolings and labels are of encoders, `rope.scaling.alpha` is of Hunyuan's models, and there are no experts."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"), (0,)),
    **dict.fromkeys(("attention.sliding_window", "attn_logit_softcapping", "embedding_length_out"), (0,)),
    **dict.fromkeys(("final_logit_softcapping", "nextn_predict_layers", "rope.scaling.yarn_log_multiplier"), (0,)),
    **dict.fromkeys(("embedding_scale", "expert_count", "logit_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    **{"deepstack_mapping": ([],), "expert_shared_feed_forward_length": (0,)},
    **{"attention.causal": (True,), "rope.scaling.yarn_ext_factor": (1,), "use_parallel_residual": (False,)},
}
"""Settings that are not implemented, and the values with which they change nothing."""


def _check_settings(given: Callable[..., Any], kind: str) -> None:
    """Refuse the first setting that changes the result and is not implemented."""
    read = OWN_KEYS.get(kind, frozenset[str]())
    if kind == "granite" and given("rope.scaling.finetuned", True) is not True:
        raise UnsupportedModelError(
            f"{kind}.rope.scaling.finetuned false is not supported: a Granite without positions"
        )
    for name, values in NEUTRAL.items():
        if name not in read and given(name, values[0]) not in values:
            raise UnsupportedModelError(f"{kind}.{name} {given(name)} is not supported; {values[0]} is")


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


def _granite(given: Callable[..., Any], kind: str, head_dim: int) -> dict[str, Any]:
    """Multipliers of a Granite's config.json."""
    neutral = {"attention.scale": head_dim**-0.5}
    return {ours: given(theirs) or neutral.get(theirs, 1.0) for theirs, ours in GRANITE_READ.items()}


def _phi3(given: Callable[..., Any], head_dim: int, longrope: Mapping[str, list[float]]) -> dict[str, Any]:
    """Fields of a Phi-3's config.json alone. It has the window that transformers computes, and llama.cpp does not."""
    scaling = {"rope_type": "longrope", **longrope, "attention_factor": given("rope.scaling.attn_factor", 1.0)}
    return {
        "partial_rotary_factor": given("rope.dimension_count", head_dim) / head_dim,
        "sliding_window": given("attention.sliding_window") or None,
        "original_max_position_embeddings": given("rope.scaling.original_context_length", given("context_length")),
        "rope_scaling": {"factor": 1.0, **scaling} if longrope else None,
    }


def _olmo3(given: Callable[..., Any], kind: str, divisors: Any) -> dict[str, Any]:
    """Fields of an OLMo 3's config.json: windows, and positions that are not scaled in layers with one."""
    depth, pattern = given("block_count"), given("attention.sliding_window_pattern", 4)
    if isinstance(pattern, int):
        pattern = [pattern == 0 or (i + 1) % pattern != 0 for i in range(depth)]
    base = given("rope.freq_base", 10000.0)
    return {
        "model_type": "olmo3",
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern],
        "sliding_window": given("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": {"rope_theta": base, **(_rope_scaling(given, kind, divisors) or {})},
            "sliding_attention": {"rope_theta": given("rope.freq_base_swa", base)},
        },
    }


_SCALING = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _rope_scaling(given: Callable[..., Any], kind: str, divisors: Any) -> dict[str, Any] | None:
    """config.json's `rope_scaling`, by llama.cpp's rules: linear where no type is given, a factor of 0 for none."""
    form = given("rope.scaling.type", "linear")
    factor = given("rope.scaling.factor", given("rope.scale_linear", 0.0))
    if not isinstance(factor, int | float):
        raise UnsupportedModelError(f"{kind}.rope.scaling.factor: expected a number, got {factor!r}")
    factor = 1.0 if form == "none" else factor or 1.0
    if divisors is not None:
        if form not in ("none", "linear"):
            raise UnsupportedModelError(f"{kind}.rope.scaling.type {form!r} is not supported next to {ROPE_DIVISORS}")
        return {"rope_type": "divided", "divisors": [float(divisor) * factor for divisor in divisors]}
    if form in ("none", "linear") and factor == 1.0:
        return None
    numbers = {ours: given(f"rope.scaling.{theirs}") for theirs, ours in _SCALING.items()}
    scaling = {"rope_type": form, "factor": factor, **numbers}
    return {name: number for name, number in scaling.items() if number is not None}


_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Names that llama-gguf-split gives to the parts of a file."""


def part_names(name: str) -> list[str]:
    """Names of all parts of the model of which `name` is one part; the name alone for a whole file."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match['stem']}-{i:05}-of-{match['count']}.gguf" for i in range(1, int(match["count"]) + 1)]


def _other_parts(first: GGUFFile) -> list[GGUFFile]:
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


class GGUFWeights(GGUFFile):
    """The language model of a GGUF file, or of the parts of a split one: configuration, and weights by their keys."""

    def __init__(self, path: Path):
        """Open the file."""
        super().__init__(path)
        architecture = self._architecture = str(self.metadata.get("general.architecture"))
        self._places: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
        self._halves: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
        """Second half of a weight whose rows alternate between two tensors."""
        for part in (self, *_other_parts(self)):
            for name, tensor in part.tensors.items():
                key = name if name == ROPE_DIVISORS else tensor_key(name, architecture)
                for own, matrix in _single_experts(key, tensor):
                    if own in self._places:
                        raise part.fault(f"{name} is there twice")
                    self._places[own] = part, matrix
        if architecture == "gpt-oss":
            self._join_halves()
        divisors = self._places.pop(ROPE_DIVISORS, None)
        factors = {key: self._places.pop(name, None) for name, key in LONGROPE_FACTORS.items()}
        numbers: Callable[..., Any] = lambda place: place[0].view(*place[1][2:]).view(np.float32)
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
            key: TensorInfo(DTYPES.get(tensor.kind, floats), *tensor[1:]) for key, tensor in stored.items()
        }
        self.packed = {
            key: QuantizedEntry(path, (key,), (shape[0], shape[1]), kind, partial(convert, kind))
            for key, (kind, shape, *_) in stored.items()
            for kinds, convert in [_EXPERTS_AS_STORED if ".experts." in key else _AS_STORED]
            if kind in kinds and len(shape) == 2
        }

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

    def kind(self, name: str) -> str:
        """Type of a tensor."""
        return self._places[name][1].kind

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
        else:
            rows = part.view(start, end).reshape(shape[0], -1)
        if (heads := rotated(name, self.config)) is not None:
            rows = restored(rows, heads)
        if name in self.packed:
            return rows
        if kind in DTYPES:
            weight = rows.view(DTYPES[kind]).reshape(shape)
            # llama.cpp's converter adds 1 to the norms of a Gemma, which multiply by 1 + weight.
            return weight - 1 if self._architecture in _GEMMA and name.endswith("norm.weight") else weight
        return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(shape)

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory."""
        for part, tensor in filter(None, (self._places[name], self._halves.get(name))):
            part.release_pages(tensor.start, tensor.end)

    def generation_config(self) -> dict[str, float]:
        """The sampling that the file recommends, by generation_config.json's names."""
        names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        names["penalty_repeat"] = "repetition_penalty"
        given = {ours: self.metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
        return {name: value for name, value in given.items() if value is not None}


def _from_blocks(kind: str, **rows: np.ndarray) -> BlockQuantizedWeight:
    return BlockQuantizedWeight.from_blocks(kind, *rows.values())


def _integers(kind: str, **rows: np.ndarray) -> QuantizedWeight:
    return from_ggml(kind, *rows.values())


_AS_STORED, _EXPERTS_AS_STORED = (tuple(BLOCK_KINDS), _from_blocks), (GGML_KINDS, _integers)
"""Types of matrices that are not dequantised, and the function that makes a weight of their rows."""


def _single_experts(key: str, tensor: GGUFTensor) -> list[tuple[str, GGUFTensor]]:
    """A tensor by its key; of a stack of experts, each matrix by its own."""
    if "{}" not in key:
        return [(key, tensor)]
    count, *shape = tensor.shape
    size = (tensor.end - tensor.start) // count
    starts = range(tensor.start, tensor.end, size)
    return [(key.format(i), GGUFTensor(tensor.kind, tuple(shape), at, at + size)) for i, at in enumerate(starts)]
