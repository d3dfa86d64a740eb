"""Programs of a model as its engine compiles them: of shapes alone, on devices that need not be attached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from verax.errors import InvalidParameterError
from verax.plan.devices import Device
from verax.plan.embed import encoder_pass
from verax.plan.model import Described
from verax.plan.text import text_plan
from verax.plan.video import denoising_step
from verax.text.step.program import StepProgram

__all__ = ["programs_of"]


def programs_of(
    model: Described, device: Device, mesh: Mesh, *, depth: int | None = None, **options: Any
) -> list[StepProgram]:
    """The programs that take most of a model's time, the largest of each kind that its engine has.

    Of a language model, the decode step and the mixed step; of an encoder, one batch of sentences; of a video model,
    one forward pass of the transformer.

    Args:
        model: the model.
        device: kind of device.
        mesh: the devices, with an axis `tensor`.
        depth: layers of the model, or blocks of the transformer; all if None.
        options: those of `text_plan`, `encoder_pass` or `denoising_step`.

    Raises:
        InvalidParameterError: for an option out of range.
    """
    if model.kind == "text":
        return _text_programs(_with_depth(model, depth), device, mesh, options)
    if model.kind == "video":
        name, function, arguments = denoising_step(model, depth=depth, **options)
    else:
        (name, function, arguments, *_), _ = encoder_pass(_with_depth(model, depth), **options)
    whole = PartitionSpec()
    return [StepProgram(name, function, arguments, jax.tree.map(lambda _: whole, arguments), whole, mesh, donated=())]


def _text_programs(model: Described, device: Device, mesh: Mesh, options: Mapping[str, Any]) -> list[StepProgram]:
    plan = text_plan(model, device, **options)
    shapes = plan.sizes().shapes
    decode = max(shape for shape in shapes if shape.decode)
    mixed = max((shape for shape in shapes if not shape.decode), key=lambda shape: (shape.tokens, shape.rows))
    return [
        replace(plan.program(decode, mesh), name=f"decode step: {decode.rows} sequences of {plan.context} tokens"),
        replace(plan.program(mixed, mesh), name=f"mixed step: {mixed.rows} sequences, {mixed.tokens} tokens"),
    ]


def _with_depth(model: Described, depth: int | None) -> Described:
    """A model cut to its first layers."""
    if depth is None:
        return model
    if model.opened is not None:
        raise InvalidParameterError("depth: a GGUF file has weights for all of its layers and is compiled whole")
    return model._replace(config=_cut(model.config, depth))


def _cut(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    cut: dict[str, Any] = {**config, "num_hidden_layers": depth}
    if "layer_types" in config:
        cut["layer_types"] = config["layer_types"][:depth]
    if "text_config" in config:
        cut["text_config"] = _cut(config["text_config"], depth)
    return cut
