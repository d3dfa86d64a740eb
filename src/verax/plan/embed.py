"""Plan of a sentence encoder: memory of its weights, work and least time of a batch of sentences."""

from __future__ import annotations

from typing import Any

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
from verax.plan.parts import parts_of
from verax.plan.roofline import bound, described
from verax.plan.work import count, trace

__all__ = ["plan_embed"]

TOKENS = 128
"""Tokens of a sentence if no context is given."""


def plan_embed(
    model: Described, device: Device, *, dtype: str = "float32", sentences: int = 8, tokens: int | None = None
) -> dict[str, Any]:
    """Plan of an encoder, as JSON holds it. Pooling is left out: it multiplies nothing.

    Args:
        model: the model.
        device: kind of device.
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
    parts = parts_of(shapes)
    graph, state = nnx.split(shapes)

    def encode(state: Any, ids: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Float[Array, "B T D"]:
        return models.hidden_states(nnx.merge(graph, state), ids, Sentences.padded(lengths, tokens))

    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((sentences, tokens), (sentences,)))
    with ops.use_target(device.platform, device.kind, device.memory):
        work = count(trace(encode, state, ids, lengths))
    least = bound(work, device)
    memory = {"weights": sum(part.nbytes for part in parts), "states": work.results}
    return {
        "kind": model.kind,
        "model": model.name,
        "device": device.as_dict(),
        "settings": {"dtype": dtype, "sentences": sentences, "tokens": tokens},
        "weights": [part._asdict() for part in parts],
        "memory": memory,
        "programs": [described(f"{sentences} sentences of {tokens} tokens", work, least)],
        "at_most": {"sentences/s": sentences / least.seconds},
        "fits": sum(memory.values()) <= device.memory,
    }
