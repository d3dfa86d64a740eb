"""Mixtures of experts in a text benchmark: shapes, and how much of the weights a step reads and a token multiplies."""

from __future__ import annotations

import math
from typing import Any

from flax import nnx

from verax.checkpoint import Checkpoint

__all__ = ["MOE", "unread_bytes", "unused_weights"]

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "max_position_embeddings": 40960,
}
"""Four of Qwen3-30B-A3B's 48 layers, with a fifth of its vocabulary: 5.3 GB in bfloat16."""


def unread_bytes(module: Any, rows: int) -> float:
    """Bytes of experts that a step of `rows` tokens does not read; 0 for a dense model.

    The mean over choices in which each expert is as likely as the others.
    """
    if (experts := getattr(module.config, "experts", None)) is None:
        return 0.0
    leaves = nnx.to_flat_state(nnx.state(module))
    stored = sum(leaf.get_value().nbytes for path, leaf in leaves if "experts" in path)
    return stored * (1 - experts.num_experts_per_tok / experts.num_experts) ** rows


def unused_weights(opened: Checkpoint, config: Any) -> float:
    """Weights of experts that a token does not pass; 0 for a dense model."""
    if (experts := getattr(config, "experts", None)) is None:
        return 0.0
    stored = sum(math.prod(opened.shape(name)) for name in opened.names() if ".experts." in name)
    return stored * (1 - experts.num_experts_per_tok / experts.num_experts)
