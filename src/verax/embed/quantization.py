"""Encoders and rerankers whose matrix products are of 8-bit integers: weights by row, inputs by token (W8A8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flax import nnx

from verax.errors import InvalidParameterError
from verax.nn import Linear
from verax.ops import QuantizedWeight

__all__ = ["QUANTIZATIONS", "check_quantization", "round_linear_inputs"]

QUANTIZATIONS = ("int8",)
"""Names that `Encoder` and `Reranker` take."""


def check_quantization(quantization: str | None) -> None:
    """Check that there is such a quantisation.

    Raises:
        InvalidParameterError: for another name.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise InvalidParameterError(
            f"quantization: expected {' or '.join(map(repr, QUANTIZATIONS))} or None, got {quantization!r}"
        )


def round_linear_inputs(model: Any, *, keep_head: bool = False) -> None:
    """Make the linear layers with weights of 8-bit integers round their inputs to such integers too, in place.

    Args:
        model: a loaded model.
        keep_head: keep a language model's own head, which rerankers read the answer of and no encoder calls. The head
            that quantising makes of tied embeddings is dropped in any case: the embeddings themselves stay floats.
    """
    if hasattr(model, "lm_head") and (model.config.tie_word_embeddings or not keep_head):
        model.lm_head = None
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, Linear):
            weight: Any = layer.weight.get_value()
            if isinstance(weight, QuantizedWeight):
                layer.weight = nnx.Param[Any](replace(weight, rounds_inputs=True))
