"""sentence-transformers' `Dense`: a layer behind the pooling, as LaBSE and EmbeddingGemma have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax.errors import UnsupportedModelError
from verax.fields import Size, file_of, read_fields, read_value, require_fields
from verax.models.bert import ACTIVATIONS
from verax.nn import Linear

__all__ = ["Dense", "DenseConfig", "activation_function"]

_TORCH: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "Sigmoid": nnx.sigmoid,
    "ReLU": ACTIVATIONS["relu"],
    "GELU": ACTIVATIONS["gelu"],
    "SiLU": nnx.silu,
}
"""Functions by the last part of torch's name for them."""


def activation_function(name: str, where: str) -> Callable[[Array], Array]:
    """The function that a file of sentence-transformers names, such as `torch.nn.modules.activation.Tanh`.

    Raises:
        UnsupportedModelError: for another one, with the file.
    """
    module, _, found = name.rpartition(".")
    if not module.startswith("torch.nn.modules.") or found not in _TORCH:
        raise UnsupportedModelError(
            f"{where}: activation function {name!r} is not supported; torch.nn's {', '.join(_TORCH)} are"
        )
    return _TORCH[found]


@dataclass(frozen=True)
class DenseConfig:
    """Settings of a layer, under their names in its config.json."""

    in_features: Size
    out_features: Size
    activation: Callable[[Array], Array]
    bias: bool = True

    @classmethod
    def from_file(cls, config: Mapping[str, Any]) -> DenseConfig:
        """Read the config.json of the layer's folder.

        Raises:
            UnsupportedModelError: for another activation function, a residual sum, or a missing size.
            CheckpointError: for a value of a wrong type.
        """
        require_fields(config, ("in_features", "out_features"), "Dense layer")
        if read_value(config, "use_residual", bool, False):
            raise UnsupportedModelError(f"{file_of(config)}: use_residual is not supported")
        name = read_value(config, "activation_function", str, "torch.nn.modules.activation.Tanh")
        values = read_fields(config, cls, ("in_features", "out_features", "bias"))
        return cls(**values, activation=activation_function(name, file_of(config)))


class Dense(nnx.Module):
    """Linear layer and activation on a sentence's vector."""

    def __init__(self, config: DenseConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.activation = config.activation
        self.linear = Linear(config.in_features, config.out_features, bias=config.bias, dtype=dtype, rngs=rngs)

    def __call__(self, vectors: Float[Array, "B D"]) -> Float[Array, "B F"]:
        """Map each vector; float32."""
        return self.activation(self.linear(vectors))
