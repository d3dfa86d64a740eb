"""Plan of a sentence encoder: memory of its weights, work and least time of a batch of sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from verax import models, ops
from verax.errors import InvalidParameterError
from verax.loading import model_shapes
from verax.nn import Sentences
from verax.plan.devices import Device
from verax.plan.model import Described
from verax.plan.parts import packed_shapes, parts_of
from verax.plan.roofline import bound, described
from verax.plan.work import count, trace

__all__ = ["EncoderPass", "encoder_pass", "plan_embed"]

TOKENS = 128
"""Tokens of a sentence if no context is given."""


class EncoderPass(NamedTuple):
    """Encoder on a batch of sentences, without pooling, which multiplies nothing.

    Attributes:
        name: what it does.
        function: function of `arguments`.
        arguments: shapes of the state, of the tokens `[B, T]`, and of the lengths `[B]`.
        sentences: number of sentences B.
        tokens: tokens of each sentence T.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    sentences: int
    tokens: int


def encoder_pass(
    model: Described, *, dtype: str = "float32", sentences: int = 8, tokens: int | None = None
) -> tuple[EncoderPass, Any]:
    """The program of an encoder, and its module of shapes.

    Args:
        model: the model.
        dtype: `"float32"`, or `"bfloat16"` for weights and inputs of products.
        sentences: sentences of a call.
        tokens: tokens of each sentence; 128 if None.

    Raises:
        InvalidParameterError: for an option out of range.
        UnsupportedModelError: if verax has no such encoder.
    """
    models.check_dtype(dtype)
    architecture, config = models.encoder(model.config)
    tokens = tokens or min(TOKENS, config.max_position_embeddings)
    if not 0 < tokens <= config.max_position_embeddings:
        raise InvalidParameterError(f"context: expected 1 to {config.max_position_embeddings} tokens, got {tokens}")
    shapes: Any = model_shapes(architecture, config, dtype=models.DTYPES[dtype])
    graph, state = nnx.split(shapes)

    def encode(state: Any, ids: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Float[Array, "B T D"]:
        return models.hidden_states(nnx.merge(graph, state), ids, Sentences.padded(lengths, tokens))

    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((sentences, tokens), (sentences,)))
    name = f"{sentences} sentences of {tokens} tokens"
    return EncoderPass(name, encode, (state, ids, lengths), sentences, tokens), shapes


def plan_embed(model: Described, device: Device, *, dtype: str = "float32", **options: Any) -> dict[str, Any]:
    """Plan of an encoder, as JSON holds it. Arguments and errors are those of `encoder_pass`."""
    encoder, shapes = encoder_pass(model, dtype=dtype, **options)
    parts = parts_of(packed_shapes(shapes, device))
    with ops.use_target(device.platform, device.kind, device.memory):
        work = count(trace(encoder.function, *encoder.arguments))
    least = bound(work, device)
    memory = {"weights": sum(part.nbytes for part in parts), "states": work.results}
    return {
        "kind": model.kind,
        "model": model.name,
        "device": device.as_dict(),
        "settings": {"dtype": dtype, "sentences": encoder.sentences, "tokens": encoder.tokens},
        "weights": [part._asdict() for part in parts],
        "memory": memory,
        "programs": [described(encoder.name, work, least)],
        "at_most": {"sentences/s": encoder.sentences / least.seconds},
        "fits": sum(memory.values()) <= device.memory,
    }
