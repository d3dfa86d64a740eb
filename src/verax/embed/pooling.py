"""Vectors from the hidden states of a sentence's tokens: pooling, further layers, and 8-bit products (W8A8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from verax import progress
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import Size, file_of, read_fields, read_value, require_fields
from verax.loading import load_model
from verax.models import DTYPES
from verax.models.bert import ACTIVATIONS
from verax.nn import Linear, Sentences, pack_linear_weights
from verax.ops import QuantizedWeight

__all__ = [
    "POOLINGS",
    "QUANTIZATIONS",
    "Dense",
    "DenseConfig",
    "activation_function",
    "cut",
    "load_for_calls",
    "normalized",
    "pool",
]

POOLINGS = ("mean", "cls", "lasttoken")
"""Poolings: the mean over all tokens, special ones included, or the state of the first or the last token."""


def pool(
    hidden: Float[Array, "B T D"], sentences: Sentences, pooling: str, skipped: int | Int[Array, ""] = 0
) -> Float[Array, "S D"]:
    """Pool hidden states into one vector a sentence, float32. Padding does not count.

    Args:
        hidden: hidden states.
        sentences: places of the sentences.
        pooling: one of `POOLINGS`.
        skipped: number of first tokens, a prompt's, that do not count for a mean.
    """
    if pooling == "mean":
        return sentences.mean(hidden, skipped)
    states = sentences.first(hidden) if pooling == "cls" else sentences.last(hidden)
    return states.astype(jnp.float32)


def normalized(vectors: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Vectors of length 1; zero stays zero."""
    squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))  # torch's normalize has 1e-12 for the length


def cut(vectors: Float32[np.ndarray, "n D"], dimensions: int, normalize: bool = True) -> Float32[np.ndarray, "n d"]:
    """First numbers of each vector, of length 1 again if `normalize` (Kusupati et al., 2022, arXiv:2205.13147)."""
    if dimensions == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dimensions]
    if not normalize:
        return kept.copy()  # not a view, which would hold the whole vectors in memory
    return kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.finfo(np.float32).tiny)


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
    module, _, function = name.rpartition(".")
    if not module.startswith("torch.nn.modules.") or function not in _TORCH:
        raise UnsupportedModelError(
            f"{where}: activation function {name!r} is not supported; torch.nn's {', '.join(_TORCH)} are"
        )
    return _TORCH[function]


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


QUANTIZATIONS = ("int8",)
"""Names that `Encoder` and `Reranker` take."""


def load_for_calls(
    opened: Checkpoint,
    model_class: Callable[..., Any],
    config: Any,
    dtype: str,
    quantization: str | None,
    *,
    keep_head: bool = False,
    show_progress: bool,
) -> Any:
    """Load a model, quantise it if asked for, and pack its weights for the processor.

    Args:
        opened: the checkpoint.
        model_class: class of the model.
        config: configuration of the model.
        dtype: name of the dtype of weights and matmul inputs.
        quantization: a name of `QUANTIZATIONS`, or None.
        keep_head: keep a language model's own head, from which rerankers read the answer.
            Encoders do not call it. The head that quantising makes of tied embeddings is dropped in any case: the
            embeddings themselves stay floats.
        show_progress: show a bar while loading, if stderr is a terminal.

    Raises:
        CheckpointError: if the weights do not fit the configuration.
        InvalidParameterError: for another quantisation.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise InvalidParameterError(
            f"quantization: expected {' or '.join(map(repr, QUANTIZATIONS))} or None, got {quantization!r}"
        )
    with progress.bar("loading weights", enabled=show_progress, count=False) as report:
        model = load_model(opened, model_class, config, dtype=DTYPES[dtype], quantization=quantization, progress=report)
    if quantization is not None:
        if hasattr(model, "lm_head") and (config.tie_word_embeddings or not keep_head):
            model.lm_head = None
        for _, layer in nnx.iter_modules(model):
            if isinstance(layer, Linear):
                weight: Any = layer.weight.get_value()
                if isinstance(weight, QuantizedWeight):
                    layer.weight = nnx.Param[Any](replace(weight, rounds_inputs=True))
    pack_linear_weights(model)
    return model
