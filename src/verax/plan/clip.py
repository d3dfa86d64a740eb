"""A clip to plan: the parts of a video model, the sizes of the clip, the devices that divide it, and its programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import UMT5_XXL, VAE, VAE_2_2, VIT_H14
from verax.errors import InvalidParameterError
from verax.models import DTYPES, check_dtype
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.video_model import LatentGeometry, VideoSettings
from verax.models.wan.family import encode_first_frame, latent_geometry, read_settings
from verax.models.wan.model import WAN_CONFIGS, WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.plan.work import trace
from verax.video.denoise import Conditions, predict_velocity
from verax.video.load import Components, divided_component
from verax.video.mesh import (
    BY_ROW,
    REPLICATED,
    abstract_mesh,
    check_heads,
    check_request,
    check_shard_weights,
    choose_parallelism,
    layout,
)
from verax.video.networks import Denoiser, Stages
from verax.video.programs import Component, Program, ProgramCall, Weights, floats
from verax.video.request import ResolvedRequest, VideoRequest

__all__ = [
    "KEYS",
    "STEP",
    "Call",
    "Clip",
    "ClipProgram",
    "VideoModel",
    "components",
    "denoising",
    "programs",
    "read_model",
]

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""Function of arrays, and shapes of its arguments."""

KEYS = "cross-attention keys"
STEP = "denoising step, prompt and negative prompt"
"""Names of two programs."""


class VideoModel(NamedTuple):
    """Configurations of a video model's parts, and its defaults."""

    transformer: WanConfig
    vae: WanVaeConfig
    text: UMT5Config
    image: CLIPVisionConfig | None
    settings: VideoSettings

    @property
    def geometry(self) -> LatentGeometry:
        """Sizes of its latents."""
        return latent_geometry(self.transformer, self.vae)

    @property
    def condition_channels(self) -> int:
        """Channels of an image condition behind those of the latents."""
        return max(0, self.transformer.in_dim - self.vae.z_dim)


class Clip(NamedTuple):
    """A clip of a model on devices.

    Attributes:
        model: the model.
        dtype: of transformer and encoders.
        num_frames, height, width: its size.
        inference_steps: steps of the solver.
        latents: shape of its latents.
        mesh: devices that divide it, which need not be there; None for one.
        shard_weights: True if they divide the weights of the transformer's blocks too.
    """

    model: VideoModel
    dtype: DTypeLike
    num_frames: int
    height: int
    width: int
    inference_steps: int
    latents: tuple[int, ...]
    mesh: AbstractMesh | None
    shard_weights: bool

    @classmethod
    def checked(
        cls,
        model: VideoModel,
        dtype: str,
        *,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        inference_steps: int | None = None,
        devices: int | None = None,
        guidance_parallel: bool = False,
        sequence_parallel: int = 1,
        shard_weights: bool = False,
    ) -> Clip:
        """A clip with the checkpoint's defaults for what is not given.

        Raises:
            InvalidParameterError: for a size that does not divide into latents and tokens; or, as a pipeline does, for
                devices that cannot divide the clip.
        """
        check_dtype(dtype)
        settings, geometry = model.settings, model.geometry
        num_frames = num_frames or settings.num_frames
        height, width = height or settings.height, width or settings.width
        _check_size(geometry, num_frames, height, width)
        guidance_parallel, sequence_parallel = choose_parallelism(
            guidance_parallel=guidance_parallel,
            sequence_parallel=sequence_parallel,
            devices=devices,
            heads=model.transformer.num_heads,
            request=VideoRequest(height=height, width=width),
            settings=settings,
            geometry=geometry,
            attached=False,
        )
        mesh = abstract_mesh(guidance_parallel=guidance_parallel, sequence_parallel=sequence_parallel)
        check_heads(mesh, model.transformer)
        check_shard_weights(mesh, shard_weights=shard_weights)
        request = ResolvedRequest(height=height, width=width, guidance_scale=settings.guidance_scale)
        check_request(mesh, request, geometry)
        latents = geometry.shape(geometry.latents(num_frames), height, width)
        steps = inference_steps or settings.num_inference_steps
        return cls(model, DTYPES[dtype], num_frames, height, width, steps, latents, mesh, shard_weights)

    @property
    def size(self) -> str:
        """The size in words."""
        return f"{self.num_frames} frames of {self.height} x {self.width}"


class ClipProgram(NamedTuple):
    """A program of a clip.

    Attributes:
        name: what it does.
        times: number of its calls.
        traced: the program.
        devices: number of devices that run it.
    """

    name: str
    times: int
    traced: ClosedJaxpr
    devices: int


def read_model(config: str | Path) -> VideoModel:
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
    return VideoModel(
        transformer,
        WanVaeConfig.from_hf(part("vae", vae)),
        UMT5Config.from_hf(part("text_encoder", UMT5_XXL)),
        image,
        settings,
    )


def _check_size(geometry: LatentGeometry, frames: int, height: int, width: int) -> None:
    token, group = geometry.pixels_per_token, geometry.frames_per_latent
    if frames < 1 or (frames - 1) % group:
        raise InvalidParameterError(f"frames: expected a multiple of {group} and one more, got {frames}")
    for name, value in (("height", height), ("width", width)):
        if value < 1 or value % token:
            raise InvalidParameterError(f"{name}: expected a multiple of {token} pixels, got {value}")


def components(clip: Clip) -> Components:
    """The models, as the devices of the clip hold them."""

    def part(what: str, kind: Any, config: Any, dtype: DTypeLike, *, keep: bool | None = None) -> Component[Any]:
        mesh, sharded = clip.mesh, clip.shard_weights
        return divided_component(what, kind, config, dtype, lambda it: it, keep=keep, mesh=mesh, shard_weights=sharded)

    parts, dtype = clip.model, clip.dtype
    experts = parts.settings.boundary_ratio is not None
    names = ("high-noise transformer", "low-noise transformer") if experts else ("transformer",)
    return Components(
        part("text encoder", UMT5EncoderModel, parts.text, dtype),
        None if parts.image is None else part("image encoder", CLIPVisionModel, parts.image, dtype),
        tuple(part(name, WanModel, parts.transformer, dtype, keep=None if experts else True) for name in names),
        part("video VAE", WanVae, parts.vae, jnp.float32, keep=True),
    )


def programs(clip: Clip, models: Components) -> list[ClipProgram]:
    """Programs of the clip. Those of a mesh are one `jax.shard_map`."""
    parts, (text, image, transformers, vae) = clip.model, models
    stages = Stages(
        text_encoder=text,
        image_encoder=image,
        vae=vae,
        decode_dtype=clip.dtype,
        encode_image=encode_first_frame,
        mesh=clip.mesh,
    )
    words = parts.settings.text_tokens
    found = [_program(f"text encoder, {words} tokens", 2, stages.text_call(words))]
    if image is not None:
        found.append(_program("image encoder", 1, stages.image_call()))
    if parts.condition_channels:
        found.append(_program("image condition", 1, stages.condition_call(clip.num_frames, clip.height, clip.width)))
    keys, step = denoising(transformers[0], clip)
    devices = 1 if clip.mesh is None else clip.mesh.size
    found.append(ClipProgram(KEYS, len(transformers), trace(keys[0], *keys[1]), devices))
    found.append(ClipProgram(STEP, clip.inference_steps, trace(step[0], *step[1]), devices))
    return [*found, _program("VAE decode", 1, stages.decode_call(floats(*clip.latents)))]


def _program(name: str, times: int, call: ProgramCall) -> ClipProgram:
    """Program of a stage. The function that is compiled gets its options by name."""
    traced = trace(partial(call.program.function, **call.options), call.component.shapes, *call.arguments)
    mesh = call.component.mesh
    return ClipProgram(name, times, traced, 1 if mesh is None else mesh.size)


def denoising(transformer: Component[WanModel], clip: Clip) -> tuple[Call, Call]:
    """Calls for the cross-attention keys and for one step, of a prompt and a negative prompt."""
    parts, config, denoiser = clip.model, clip.model.transformer, Denoiser(transformer, clip.mesh)
    text = floats(2, parts.settings.text_tokens, config.text_dim)
    patches = 0 if parts.image is None else parts.image.num_patches + 1
    image = None if config.image_dim is None else floats(2, patches, config.image_dim)
    fps = jax.ShapeDtypeStruct((1,), jnp.int32) if config.inject_sample_info else None

    def velocity(weights: Weights, latents: Any, timesteps: Any, context: Any, fps: Any) -> Any:
        conditions = Conditions(context, None, fps, parts.settings.guidance_scale, None, 0, None)  # type: ignore[arg-type]
        module = transformer.module(weights)
        return predict_velocity(module, latents, timesteps, conditions, mesh=clip.mesh, guidance="batch")[0]

    divided = layout(clip.mesh, transformer.partition, REPLICATED, REPLICATED, BY_ROW, REPLICATED)
    keys = denoiser.context_program.function, (transformer.shapes, text, image)
    context = jax.eval_shape(keys[0], *keys[1])
    latents = floats(*clip.latents[:-1], config.in_dim)
    timesteps = jax.ShapeDtypeStruct((), jnp.int32)
    return keys, (Program(velocity, layout=divided).function, (transformer.shapes, latents, timesteps, context, fps))
