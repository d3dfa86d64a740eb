"""A plan of any model: language model, sentence encoder or video model, by what its configuration says."""

from __future__ import annotations

from typing import Any

from verax.errors import InvalidParameterError
from verax.plan.compiled.run import compile_model
from verax.plan.compiled.topology import compiler_of
from verax.plan.devices import Device
from verax.plan.embed import plan_embed
from verax.plan.model import describe
from verax.plan.text import plan_text
from verax.plan.video import plan_video

__all__ = ["plan"]

_ENGINES = {"text": plan_text, "embedding": plan_embed, "video": plan_video}

_PARALLEL = ("guidance_parallel", "sequence_parallel", "shard_weights")

_OPTIONS = {
    "text": ("dtype", "quantization", "kv_cache_dtype", "max_num_seqs", "context", "devices"),
    "embedding": ("dtype", "max_num_seqs", "context"),
    "video": ("dtype", "frames", "height", "width", "inference_steps", "devices", *_PARALLEL),
}
"""Options that each kind of model has."""

_NAMES = {"embedding": {"max_num_seqs": "sentences", "context": "tokens"}, "video": {"frames": "num_frames"}}
"""Options that a kind of model has under another name."""


def plan(
    model: str, device: Device, *, compiled: bool = False, depth: int | None = None, **options: Any
) -> dict[str, Any]:
    """Plan of a model on a device, as JSON holds it.

    Args:
        model: see `plan.model.describe`.
        device: kind of device.
        compiled: compile the model's programs for the device, see `plan.compiled.run`.
        depth: layers to compile; all if None.
        options: `dtype`, `quantization`, `kv_cache_dtype`, `max_num_seqs`, `context` and `devices` of a language model,
            the first, `max_num_seqs` and `context` of an encoder; `dtype`, `frames`, `height`, `width`,
            `inference_steps`, `devices`, `guidance_parallel`, `sequence_parallel` and `shard_weights` of a video model.
            None counts as not given.

    Raises:
        CheckpointError, UnsupportedModelError: for a model that is not there, or that verax does not have.
        InvalidParameterError: for an option that this kind of model does not have, or a value out of range.
        MissingDependencyError: if programs are to be compiled, and the compiler of the device is not installed.
    """
    if depth is not None and not compiled:
        raise InvalidParameterError("depth: layers to compile; give --compile as well")
    if compiled:
        compiler_of(device)  # before anything takes time
    given = {name: value for name, value in options.items() if value is not None}
    found = describe(model, quantization=given.get("quantization"))
    taken = _OPTIONS[found.kind]
    if unknown := [name for name in given if name not in taken]:
        raise InvalidParameterError(
            f"{unknown[0]}: the plan of a model of kind {found.kind} has no such option; it has {', '.join(taken)}"
        )
    divided = [name for name in ("devices", *_PARALLEL) if name in given]
    if compiled and found.kind == "video" and divided:
        raise InvalidParameterError(f"{divided[0]}: video models compile for one device; leave this out, or --compile")
    names = _NAMES.get(found.kind, {})
    given = {names.get(name, name): value for name, value in given.items()}
    result = _ENGINES[found.kind](found, device, **given)
    if compiled:
        result["compiled"] = compile_model(found, device, depth=depth, **given)
        result["fits"] = result["fits"] and result["compiled"]["fits"]
    return result
