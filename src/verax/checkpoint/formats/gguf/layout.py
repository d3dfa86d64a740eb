"""Naming and layout of GGUF files: names of tensors, order of their rows, config.json as metadata.

Follows llama.cpp's converter (`convert_hf_to_gguf.py`) and the specification of the format,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verax.errors import UnsupportedModelError

__all__ = ["ROPE_DIVISORS", "interleaved", "read_config", "restored", "rotated", "tensor_key", "tensor_name"]

_ARCHITECTURES = ("qwen3", "qwen2", "llama")
"""Values of `general.architecture` that are supported: they are config.json's `model_type`s."""

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
_KEYS = {key: name for name, key in _NAMES.items()}
_LAYER_KEYS = {key: name for name, key in _LAYER_NAMES.items()}


def tensor_key(name: str) -> str:
    """The checkpoint's key of a tensor, `blk.3.attn_q.weight` say; the name itself if our models have none such."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if block == "blk" and part in _LAYER_NAMES else name


def tensor_name(key: str) -> str:
    """The name of the tensor that holds the weight `key`: the inverse of `tensor_key`."""
    stem, _, kind = key.rpartition(".")
    if stem in _KEYS:
        return f"{_KEYS[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_KEYS[part]}.{kind}"


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
    if kind not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"general.architecture {kind!r} is not supported; in GGUF files {', '.join(_ARCHITECTURES)} are"
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
        "model_type": kind,
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
