"""Plan of a video model: memory of its parts' weights, work and least time of each stage of a clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from verax import ops
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.published import UMT5_XXL, VAE, VAE_2_2, VIT_H14
from verax.errors import InvalidParameterError
from verax.models import DTYPES, check_dtype
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.model import WAN_CONFIGS, WanConfig, WanModel
from verax.models.wan.vae import WanVae
from verax.models.wan.vae_config import WanVaeConfig
from verax.plan.devices import Device
from verax.plan.model import Described
from verax.plan.parts import Part
from verax.plan.roofline import bound, described
from verax.plan.work import count, trace
from verax.video.geometry import LatentGeometry
from verax.video.programs import Component, ProgramCall, Weights, floats
from verax.video.settings import VideoSettings, read_settings
from verax.video.stages import Stages

__all__ = ["denoising_step", "plan_video"]


class _Model(NamedTuple):
    """Configurations of a video model's parts, and its defaults."""

    transformer: WanConfig
    vae: WanVaeConfig
    text: UMT5Config
    image: CLIPVisionConfig | None
    settings: VideoSettings


class _Clip(NamedTuple):
    """A clip to plan."""

    model: _Model
    dtype: DTypeLike
    num_frames: int
    height: int
    width: int
    inference_steps: int
    latents: tuple[int, ...]
    """Shape of its latents."""


def plan_video(model: Described, device: Device, *, dtype: str = "bfloat16", **options: int) -> dict[str, Any]:
    """Plan of a video model, as JSON holds it: one segment with guidance, all frames denoised together.

    Args:
        model: the model.
        device: kind of device.
        dtype: `"bfloat16"` or `"float32"`, of transformer and encoders.
        options: `num_frames`, `height` and `width`, the size of the clip, and `inference_steps`, steps of the solver;
            those that are not given are the checkpoint's defaults.

    Raises:
        InvalidParameterError: for a size that does not divide into latents and tokens.
        UnsupportedModelError: if verax has no such model.
    """
    clip = _clip(_read(model.config), dtype, **options)
    with ops.use_target(device.platform, device.kind, device.memory):
        found, programs = _programs(clip)
        counted = [(name, times, count(program)) for name, times, program in programs]
    rows = [described(name, work, bound(work, device), times=times) for name, times, work in counted]
    step = next(row["at_least_s"] for row in rows if row["name"] == _STEP)
    memory = {**_resident(found), "latents": 4 * math.prod(clip.latents)}
    return {
        "kind": model.kind,
        "model": model.name,
        "device": device.as_dict(),
        "settings": {
            "dtype": dtype,
            "clip": f"{clip.num_frames} frames of {clip.height} x {clip.width}",
            "inference_steps": clip.inference_steps,
        },
        "weights": [_row(component) for component in found],
        "memory": memory,
        "programs": rows,
        "at_least": {
            "seconds a step": step,
            "seconds a clip": sum(row["times"] * row["at_least_s"] for row in rows),
        },
        "fits": sum(memory.values()) <= device.memory,
    }


def denoising_step(
    model: Described, *, depth: int | None = None, dtype: str = "bfloat16", **options: int
) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
    """One forward pass of the transformer, for a prompt and a negative prompt: its name, function and arguments.

    Args:
        model: the model.
        depth: blocks of the transformer; all if None.
        dtype: as in `plan_video`.
        options: as in `plan_video`.
    """
    parts = _read(model.config)
    if depth is not None:
        parts = parts._replace(transformer=replace(parts.transformer, num_layers=depth))
    clip = _clip(parts, dtype, **options)
    _, step = _denoising(_component("transformer", WanModel, parts.transformer, clip.dtype), clip)
    return f"{_STEP}: {clip.num_frames} frames of {clip.height} x {clip.width}", *step


_Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""Function of arrays, and shapes of its arguments."""

_STEP = "denoising step, prompt and negative prompt"


def _read(config: str | Path) -> _Model:
    """Configurations of a folder, or of one of `WAN_CONFIGS`. For parts that are missing, those that are published."""
    if isinstance(config, str):
        transformer, folder = WAN_CONFIGS[config], None
        experts = 0.875 if config.endswith("a14b") else None
        settings = VideoSettings(boundary_ratio=experts)
    else:
        folder = VideoFolder(config)
        transformer = WanConfig.from_hf(folder.config("transformer"))
        settings = read_settings(folder, 1.0, kind=None, negative_prompts={})
    vae = VAE_2_2 if transformer.out_dim == WanVaeConfig.from_hf(VAE_2_2).z_dim else VAE

    def part(name: str, published: Mapping[str, Any]) -> Mapping[str, Any]:
        return folder.config(name) if folder is not None and name in folder else published

    image = CLIPVisionConfig.from_hf(part("image_encoder", VIT_H14)) if transformer.image_dim is not None else None
    return _Model(
        transformer,
        WanVaeConfig.from_hf(part("vae", vae)),
        UMT5Config.from_hf(part("text_encoder", UMT5_XXL)),
        image,
        settings,
    )


def _clip(
    parts: _Model,
    dtype: str,
    *,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    inference_steps: int | None = None,
) -> _Clip:
    """A clip with the checkpoint's defaults for what is not given, checked."""
    check_dtype(dtype)
    settings = parts.settings
    num_frames, height, width = num_frames or settings.num_frames, height or settings.height, width or settings.width
    geometry = _geometry(parts)
    _check(geometry, num_frames, height, width)
    latents = geometry.shape(geometry.latents(num_frames), height, width)
    steps = inference_steps or settings.num_inference_steps
    return _Clip(parts, DTYPES[dtype], num_frames, height, width, steps, latents)


def _geometry(parts: _Model) -> LatentGeometry:
    return LatentGeometry(
        frames_per_latent=parts.vae.frames_per_latent,
        pixels_per_latent=parts.vae.pixels_per_latent,
        pixels_per_token=parts.vae.pixels_per_latent * parts.transformer.patch,
        channels=parts.vae.z_dim,
        text_width=parts.transformer.text_dim,
    )


def _check(geometry: LatentGeometry, frames: int, height: int, width: int) -> None:
    token, group = geometry.pixels_per_token, geometry.frames_per_latent
    if frames < 1 or (frames - 1) % group:
        raise InvalidParameterError(f"frames: expected a multiple of {group} and one more, got {frames}")
    for name, value in (("height", height), ("width", width)):
        if value < 1 or value % token:
            raise InvalidParameterError(f"{name}: expected a multiple of {token} pixels, got {value}")


def _component(what: str, kind: Any, config: Any, dtype: DTypeLike, *, keep: bool | None = None) -> Component[Any]:
    return Component(what, lambda: kind(config, dtype=dtype, rngs=nnx.Rngs(0)), lambda module: module, keep=keep)


def _programs(clip: _Clip) -> tuple[list[Component[Any]], list[tuple[str, int, ClosedJaxpr]]]:
    """Models in the order of their use, and the programs of a clip with the number of their calls."""
    parts, dtype = clip.model, clip.dtype
    text = _component("text encoder", UMT5EncoderModel, parts.text, dtype)
    image = None if parts.image is None else _component("image encoder", CLIPVisionModel, parts.image, dtype)
    vae = _component("video VAE", WanVae, parts.vae, jnp.float32, keep=True)
    experts = parts.settings.boundary_ratio is not None
    names = ("high-noise transformer", "low-noise transformer") if experts else ("transformer",)
    first = _component(names[0], WanModel, parts.transformer, dtype, keep=None if experts else True)
    stages = Stages(text_encoder=text, image_encoder=image, vae=vae, decode_dtype=dtype)
    words = parts.settings.text_tokens
    programs = [(f"text encoder, {words} tokens", 2, stages.text_call(words))]
    if image is not None:
        programs.append(("image encoder", 1, stages.image_call()))
    if parts.transformer.in_dim > parts.vae.z_dim:
        programs.append(("image condition", 1, stages.condition_call(clip.num_frames, clip.height, clip.width)))
    decode = stages.decode_call(floats(*clip.latents))
    traced = [(name, times, _traced(call)) for name, times, call in programs]
    keys, step = _denoising(first, clip)
    traced += [("cross-attention keys", len(names), trace(keys[0], *keys[1]))]
    traced += [(_STEP, clip.inference_steps, trace(step[0], *step[1])), ("VAE decode", 1, _traced(decode))]
    others = [_component(name, WanModel, parts.transformer, dtype) for name in names[1:]]
    return [one for one in (text, image, first, *others, vae) if one is not None], traced


def _traced(call: ProgramCall) -> ClosedJaxpr:
    """Program of a stage. The function that is compiled gets its options by name."""
    return trace(partial(call.program.function, **call.options), call.component.shapes, *call.arguments)


def _denoising(transformer: Component[WanModel], clip: _Clip) -> tuple[_Call, _Call]:
    """Calls for the cross-attention keys and for one step, of a prompt and a negative prompt."""
    parts, config = clip.model, clip.model.transformer
    text = floats(2, parts.settings.text_tokens, config.text_dim)
    patches = 0 if parts.image is None else (parts.image.image_size // parts.image.patch_size) ** 2 + 1
    image = None if config.image_dim is None else floats(2, patches, config.image_dim)
    fps = jax.ShapeDtypeStruct((2,), jnp.int32) if config.inject_sample_info else None

    def keys(weights: Weights, text: Any, image: Any) -> Any:
        return transformer.module(weights).encode_context(text, image)

    def step(weights: Weights, latents: Any, timesteps: Any, context: Any, fps: Any) -> Any:
        return transformer.module(weights)(latents, timesteps, context, fps=fps)

    context = jax.eval_shape(keys, transformer.shapes, text, image)
    latents = floats(2, *clip.latents[1:-1], config.in_dim)
    timesteps = jax.ShapeDtypeStruct((2,), jnp.int32)
    return (keys, (transformer.shapes, text, image)), (step, (transformer.shapes, latents, timesteps, context, fps))


def _resident(components: Sequence[Component[Any]]) -> dict[str, int]:
    """Bytes of the weights that are on the device together at most, by model; models that are not kept leave."""
    kept: dict[str, int] = {}
    most: dict[str, int] = {}
    for component in components:
        now = {**kept, component.name: component.size}
        most = max(most, now, key=lambda held: sum(held.values()))
        if component.keep:
            kept = now
    return most


def _row(component: Component[Any]) -> dict[str, Any]:
    dtypes = sorted({leaf.dtype.name for leaf in component.shapes})
    weights = sum(math.prod(leaf.shape) for leaf in component.shapes)
    return Part(component.name, ", ".join(dtypes), weights, component.size, component.size)._asdict()
