"""Plan of a sentence encoder: memory of its weights, work and least time of a batch of sentences."""

from __future__ import annotations

from typing import Any

from verax import models
from verax.errors import InvalidParameterError
from verax.loading import model_shapes
from verax.plan.devices import Device, program_row
from verax.plan.model import Described
from verax.plan.parts import multiplied, packed_shapes, parts_of

__all__ = ["plan_embed"]

TOKENS = 128
"""Tokens of a sentence, if `max_length` is not given."""

FLOAT32_BYTES = 4


def plan_embed(
    model: Described, device: Device, *, dtype: str = "float32", batch_size: int = 8, max_length: int | None = None
) -> dict[str, Any]:
    """Plan of an encoder, as JSON holds it.

    Args:
        model: the model.
        device: kind of device.
        dtype: `"float32"`, or `"bfloat16"` for weights and inputs of products.
        batch_size: sentences of a call.
        max_length: tokens of each sentence; 128 if None.

    Raises:
        InvalidParameterError: for an option out of range.
        UnsupportedModelError: if verax has no such encoder.
    """
    models.check_dtype(dtype)
    architecture, config = models.encoder(model.config)
    longest = config.max_position_embeddings
    tokens = max_length or min(TOKENS, longest)
    if not 0 < tokens <= longest:
        raise InvalidParameterError(f"max_length: expected 1 to {longest} tokens, got {tokens}")
    shapes: Any = model_shapes(architecture, config, dtype=models.DTYPES[dtype])
    parts = parts_of(packed_shapes(shapes, device))
    memory = {
        "weights": sum(part.nbytes for part in parts),
        "states": FLOAT32_BYTES * batch_size * tokens * config.hidden_size,
    }
    products = 2 * tokens * multiplied(shapes)[0] + 4 * config.hidden_size * _scores(config, tokens)
    read = sum(part.nbytes for part in parts_of(shapes) if part.part != "embedding")
    program = program_row(
        f"{batch_size} sentences of {tokens} tokens",
        device,
        flops=batch_size * products,
        nbytes=read + memory["states"],
        dtype=dtype,
    )
    return {
        "kind": model.kind,
        "model": model.name,
        "device": device.as_dict(),
        "settings": {"dtype": dtype, "batch_size": batch_size, "max_length": tokens},
        "devices": 1,
        "weights": [part._asdict() for part in parts],
        "memory": memory,
        "programs": [program],
        "at_most": {"sentences/s": batch_size / program["at_least_s"]},
        "fits": sum(memory.values()) <= device.memory,
    }


def _scores(config: Any, tokens: int) -> int:
    """Pairs of a query and a key that it sees, over the layers that attend; recurrent layers are not counted."""
    kinds = getattr(config, "layer_types", None) or ("full_attention",) * config.num_hidden_layers
    reach = getattr(config, "local_attention", 0) // 2
    seen = sum(min(tokens, at + reach + 1) - max(0, at - reach) for at in range(tokens))
    return kinds.count("full_attention") * tokens**2 + kinds.count("sliding_attention") * seen
