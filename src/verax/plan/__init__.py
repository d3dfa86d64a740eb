"""Bytes, operations and least times of a model on a device that need not be there. No weights are read."""

from __future__ import annotations

import dataclasses
from typing import Any

from verax.errors import InvalidParameterError
from verax.plan.devices import Device
from verax.plan.model import describe
from verax.plan.text import plan_embed, plan_text
from verax.plan.video import plan_video

_ENGINES = {"text": plan_text, "embedding": plan_embed, "video": plan_video}

_OPTIONS = {
    "text": (
        *("dtype", "quantization", "kv_cache_dtype", "max_num_seqs", "max_model_len", "max_num_batched_tokens"),
        *("tensor_parallel_size", "speculative_config"),
    ),
    "embedding": ("dtype", "batch_size", "max_length"),
    "video": (
        *("dtype", "quantization", "resolution", "height", "width", "num_frames", "num_inference_steps"),
        *("half_size_steps", "devices", "guidance_parallel", "sequence_parallel", "shard_weights"),
    ),
}
"""Options of each kind of model, by the names of `verax serve`, `verax embed` and `verax video`."""


def plan(model: str, device: Device, **options: Any) -> dict[str, Any]:
    """Plan of a model on a device, as JSON holds it.

    `model`: see `plan.model.describe`. `options`: options of the model's engine, see `text_plan`, `plan_embed` and
    `read_clip`. None counts as not given.

    Raises:
        CheckpointError, UnsupportedModelError: for a model that is not there, or that verax does not have.
        InvalidParameterError: for an option that this kind of model does not have, or a value out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    described = describe(model, quantization=given.get("quantization"))
    taken = _OPTIONS[described.kind]
    if unknown := [name for name in given if name not in taken]:
        raise InvalidParameterError(
            f"{unknown[0]}: the plan of a model of kind {described.kind} has no such option; it has {', '.join(taken)}"
        )
    parts = _ENGINES[described.kind](described, device, **given)
    return {"kind": described.kind, "model": described.name, "device": dataclasses.asdict(device), **parts}
