"""Gradient checkpointing (Chen et al., 2016, arXiv:1604.06174): the backward pass computes each layer again.

In memory is then what goes into each layer, and what one layer computes.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from verax.errors import UnsupportedModelError
from verax.models import CausalLM

__all__ = ["recompute_layers"]


class _Recomputed(nnx.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, layer: Any):
        self.layer = layer

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        return jax.checkpoint(lambda x: self.layer(x, *args, **options))(x)


def recompute_layers(model: CausalLM) -> CausalLM:
    """Let the layers of a model, which is being traced, be computed again; return the model.

    Raises:
        UnsupportedModelError: if the model has no list of its layers.
    """
    depth = model.config.num_hidden_layers
    module: Any = model
    found = [
        (owner, name, layers)
        for _, owner in nnx.iter_modules(module)
        for name, layers in vars(owner).items()
        if isinstance(layers, nnx.List) and len(layers) == depth
    ]
    if not found:
        raise UnsupportedModelError(
            f"gradient_checkpointing: {type(model).__name__} has no nnx.List of its {depth} layers; leave it out"
        )
    for owner, name, layers in found:
        setattr(owner, name, nnx.List([_Recomputed(layer) for layer in layers]))
    return model
