"""Weights of a model in the layout in which the processor multiplies them fastest."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from verax import ops
from verax.nn.layers import Embedding, Linear

__all__ = ["is_tied_head", "pack_linear_weights", "packed_copy"]


def pack_linear_weights(model: Any, *, few_rows: bool = False) -> None:
    """Replace the weights of linear layers by those that `ops.pack_weight` makes of them, in place.

    Weights are packed one after the other, so that both forms are in memory of one weight only.

    Args:
        model: module on one device.
        few_rows: True for a language model, whose decode steps have few rows. A table of embeddings that is its output
            head too (`is_tied_head`) is packed as well.
    """
    pack = jax.jit(ops.pack_weight, static_argnames="few_rows")
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, Linear) or (few_rows and isinstance(layer, Embedding) and is_tied_head(model, layer)):
            layer.weight = nnx.Param[Any](pack(layer.weight.get_value(), few_rows=few_rows))


def packed_copy(model: Any, *, few_rows: bool = False) -> Any:
    """A model with packed weights in modules of its own. Those of `model` keep the arrays that they have.

    The arguments are those of `pack_linear_weights`.
    """
    copy = nnx.merge(*nnx.split(model))
    pack_linear_weights(copy, few_rows=few_rows)
    return copy


def is_tied_head(model: Any, table: Embedding) -> bool:
    """True if a table of embeddings is the output head of its model too.

    `model.config.tie_word_embeddings` says so. Without a configuration, or that field in it, no table is a head.
    """
    config: Any = getattr(model, "config", None)
    tied = getattr(config, "tie_word_embeddings", False)
    return tied and table.weight.get_value().shape[0] == config.vocab_size
