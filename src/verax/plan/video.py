"""Plan of a video model: memory of its parts on a device, work, collectives and least time of each stage of a clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from verax import ops
from verax.plan.clip import KEYS, STEP, Clip, ClipProgram, components, denoising, programs, read_model
from verax.plan.devices import Device
from verax.plan.model import Described
from verax.plan.parts import Part, nbytes_of
from verax.plan.roofline import bound, described
from verax.plan.work import count
from verax.video.load import Components
from verax.video.memory import add_residents, largest
from verax.video.mesh import GUIDANCE, SEQUENCE, axis_size
from verax.video.programs import Component

__all__ = ["denoising_step", "plan_video"]

FLOAT32_BYTES = 4

SOLVER_ARRAYS = 4
"""Arrays of the latents' size that the solver keeps: the sample, and three of earlier steps."""


def plan_video(model: Described, device: Device, *, dtype: str = "bfloat16", **options: Any) -> dict[str, Any]:
    """Plan of a video model, as JSON holds it: one segment with guidance, all frames denoised together.

    Args:
        model: the model.
        device: kind of device.
        dtype: `"bfloat16"` or `"float32"`, of transformer and encoders.
        options: `num_frames`, `height` and `width`, the size of the clip, `inference_steps`, steps of the solver, and
            `devices`, `guidance_parallel`, `sequence_parallel` and `shard_weights`, as `VideoPipeline` takes them;
            those that are not given are the checkpoint's defaults, and one device.

    Raises:
        InvalidParameterError: for a size that does not divide into latents and tokens, or over the devices.
        UnsupportedModelError: if verax has no such model.
    """
    clip = Clip.checked(read_model(model.config), dtype, **options)
    devices = 1 if clip.mesh is None else clip.mesh.size
    with ops.use_target(device.platform, device.kind, device.memory, devices):
        models = components(clip)
        traced = programs(clip, models)
    rows = [_row(program, device) for program in traced]
    keys = next(program.traced.out_avals for program in traced if program.name == KEYS)
    work = _work(clip, models.transformers[0], keys)
    step = next(row for row in rows if row["name"] == STEP)
    stages = _stages(clip, models, work)
    memory = add_residents((name, component, sum(held.values())) for name, component, held in stages)
    most = memory.index(largest(memory))
    return {
        "kind": model.kind,
        "model": model.name,
        "device": device.as_dict(),
        "settings": {
            "dtype": dtype,
            "clip": clip.size,
            "inference_steps": clip.inference_steps,
            **({} if clip.mesh is None else _division(clip)),
        },
        "weights": [_part(component) for component in _in_order(models)],
        "stages": [{**stage._asdict(), "together": stage.peak} for stage in memory],
        "memory": _held(stages, most),
        "programs": rows,
        "collectives": None if clip.mesh is None else _collectives(rows, step, device),
        "at_least": {
            "seconds a step": step["at_least_s"],
            "seconds a clip": sum(row["times"] * row["at_least_s"] for row in rows),
        },
        "fits": memory[most].peak <= device.memory,
    }


def denoising_step(
    model: Described, *, depth: int | None = None, dtype: str = "bfloat16", **options: Any
) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
    """One forward pass of the transformer, for a prompt and a negative prompt: its name, function and arguments.

    Args:
        model: the model.
        depth: blocks of the transformer; all if None.
        dtype: as in `plan_video`.
        options: size of the clip, as in `plan_video`.
    """
    parts = read_model(model.config)
    if depth is not None:
        parts = parts._replace(transformer=replace(parts.transformer, num_layers=depth))
    clip = Clip.checked(parts, dtype, **options)
    _, step = denoising(components(clip).transformers[0], clip)
    return f"{STEP}: {clip.size}", *step


_Stage = tuple[str, Component[Any], Mapping[str, int]]
"""Name of a stage, its model, and bytes of a device beside weights, by name."""


def _in_order(models: Components) -> list[Component[Any]]:
    """Models in the order of their use."""
    return [one for one in (models.text_encoder, models.image_encoder, *models.transformers, models.vae) if one]


def _stages(clip: Clip, models: Components, work: Mapping[str, int]) -> list[_Stage]:
    """Stages of a run, with the names of `verax video --plan`."""
    pixels = clip.num_frames * clip.height * clip.width
    found: list[_Stage] = [("text", models.text_encoder, {})]
    if models.image_encoder is not None:
        found.append(("image", models.image_encoder, {}))
    if clip.model.condition_channels:
        found.append(("encode", models.vae, {}))
    found += [("denoise", transformer, work) for transformer in models.transformers]
    return [*found, ("decode", models.vae, {"frames": 3 * FLOAT32_BYTES * pixels})]


def _work(clip: Clip, transformer: Component[Any], keys: Sequence[Any]) -> dict[str, int]:
    """Bytes on a device that denoising needs at least beside weights, by name, with the shapes of cross-attention keys.

    Guidance may run one row after the other, so that the activations of one row count.
    """
    config, size = clip.model.transformer, math.prod(clip.latents[:-1])
    tokens = size // config.patch**2 // axis_size(clip.mesh, SEQUENCE)
    # Operands of self-attention, or of the second product of the feed-forward part.
    operands = max(3 * config.dim, config.ffn_dim) * jnp.dtype(clip.dtype).itemsize
    found = {
        "latents": FLOAT32_BYTES * size * (SOLVER_ARRAYS * clip.latents[-1] + clip.model.condition_channels),
        KEYS: sum(map(nbytes_of, keys)) // axis_size(clip.mesh, GUIDANCE),
        "residual stream": FLOAT32_BYTES * tokens * config.dim,
        "largest operands": tokens * operands,
    }
    if clip.shard_weights:
        leaves = zip(transformer.shapes, transformer.partition, strict=True)
        stacks = [nbytes_of(leaf) for leaf, spec in leaves if any(spec)]
        found["largest gathered matrix"] = max(stacks) // config.num_layers
    return found


def _held(stages: Sequence[_Stage], at: int) -> dict[str, int]:
    """Bytes on a device in one stage: models that are there, and what else it needs, by name."""
    _, component, work = stages[at]
    kept = {one.name: one.size for _, one, _ in stages[:at] if one.keep}
    return {**kept, component.name: component.size, **work}


def _row(program: ClipProgram, device: Device) -> dict[str, Any]:
    """Work of all devices in a program, and its least time."""
    one = count(program.traced)
    work = replace(one, flops={dtype: program.devices * flops for dtype, flops in one.flops.items()})
    least = bound(work, device, program.devices, linked=one.sent)
    row = described(program.name, work, least, times=program.times)
    return {**row, "devices": program.devices, "sent_per_device": one.sent}


def _division(clip: Clip) -> dict[str, Any]:
    """Options that divide a clip, with what `devices` alone has chosen."""
    groups, size = (axis_size(clip.mesh, axis) for axis in (GUIDANCE, SEQUENCE))
    return {
        "devices": groups * size,
        "guidance_parallel": groups > 1,
        "sequence_parallel": size,
        "shard_weights": clip.shard_weights,
    }


def _collectives(rows: Sequence[Mapping[str, Any]], step: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Bytes that a device sends, and their share of a step that overlaps nothing; None where links are not known."""
    links = step["parts_s"]["links"]
    alone = max(step["parts_s"]["compute"], step["parts_s"]["memory"])
    return {
        "bytes_a_step": step["sent_per_device"],
        "bytes_a_clip": sum(row["times"] * row["sent_per_device"] for row in rows),
        "seconds_a_step": links if device.links else None,
        "share_of_a_step": links / (links + alone) if device.links else None,
    }


def _part(component: Component[Any]) -> dict[str, Any]:
    dtypes = sorted({leaf.dtype.name for leaf in component.shapes})
    whole = sum(map(nbytes_of, component.shapes))
    return Part(component.name, ", ".join(dtypes), component.parameters, whole, component.size)._asdict()
