"""Mixtures of experts in a text benchmark: how much of the weights a step reads and a token multiplies."""

from __future__ import annotations

import math
from typing import Any

from flax import nnx

from verax.checkpoint import Checkpoint

__all__ = ["unread_bytes", "unused_weights"]


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
