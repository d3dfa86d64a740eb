"""Weights of encoders and rerankers in the layout of products of many rows, which all of their calls are."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from verax import ops
from verax.nn import Linear

__all__ = ["pack_linear_weights"]


def pack_linear_weights(model: Any) -> None:
    """Replace the weights of linear layers by those that `ops.pack_weight` makes of them, in place.

    One after the other, so that both forms are in memory of one weight only. A model that reads its weights as arrays
    (`takes_quantized_weights`) stays as it is.
    """
    if not getattr(model, "takes_quantized_weights", True):
        return
    pack = jax.jit(ops.pack_weight)
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, Linear):
            layer.weight = nnx.Param[Any](pack(layer.weight.get_value()))
