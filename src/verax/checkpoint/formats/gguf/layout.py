"""Naming and layout of GGUF files: names of tensors, order of their rows, config.json as metadata.

Follows llama.cpp's converter (`convert_hf_to_gguf.py`) and the specification of the format,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from verax.errors import UnsupportedModelError

__all__ = [
    "ROPE_DIVISORS",
    "interleaved",
    "norm_offset",
    "read_config",
    "restored",
    "rotated",
    "tensor_key",
    "tensor_name",
]

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
    """The checkpoint's key of a tensor, `blk.3.attn_q.weight` say; the name itself if our models have none such.

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
        shapes: of the tensors, by their keys in a checkpoint.
        divisors: the file's `ROPE_DIVISORS`, if it has some.

    Raises:
        UnsupportedModelError: for another architecture, or a feature of one that verax does not have; naming it.
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
        "use_sliding_window": bool(given("attention.sliding_window")),
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
    """Further entries of a Gemma's config.json; llama.cpp knows by the depth what no metadata say."""
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
