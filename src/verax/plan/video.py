"""Plan of a clip: memory of a video model's parts on a device by stage, and least times of its programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from verax import ops
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import UMT5_XXL, VAE, VAE_2_2, VIT_H14
from verax.models import DTYPES, check_dtype
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.video_model import VideoSettings
from verax.models.wan.family import latent_geometry, named_settings, read_settings
from verax.models.wan.model import WAN_CONFIGS, WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.models.wan.vae_layers import AttentionBlock, Upsample
from verax.plan.devices import Device, program_row
from verax.plan.model import Described, Part, nbytes_of, rounds_inputs
from verax.video.load import Components, divided_component, network_precision, stays_as_stored
from verax.video.memory import add_residents, largest
from verax.video.mesh import GUIDANCE, SEQUENCE, axis_size, check_request, clip_mesh
from verax.video.programs import Component
from verax.video.request import ResolvedRequest, VideoRequest, check_sizes, default_size

FLOAT32_BYTES = 4

SOLVER_ARRAYS = 4
"""Arrays of the latents' size that the solver keeps: the sample, and three of earlier steps."""

STEP = "denoising step, prompt and negative prompt"

_SETTINGS = ("num_frames", "height", "width", "num_inference_steps", "half_size_steps")

GUIDED = 2
"""Rows of a step: the prompt and the negative prompt."""


class Clip(NamedTuple):
    """A clip of a video model on devices.

    `latents`: shape of its latents `[1, F, h, w, C]`. `half_size_tokens`: tokens of a step at half size.
    `shard_weights`: True if they divide the weights of the transformer's blocks too.
    """

    transformer: WanConfig
    vae: WanVaeConfig
    text: UMT5Config
    image: CLIPVisionConfig | None
    settings: VideoSettings
    dtype: DTypeLike
    request: ResolvedRequest
    latents: tuple[int, ...]
    half_size_tokens: int
    mesh: AbstractMesh | None
    shard_weights: bool
    quantization: str | None
    folder: VideoFolder | None

    @property
    def tokens(self) -> int:
        """Tokens of the transformer."""
        return math.prod(self.latents[1:-1]) // self.transformer.patch**2

    @property
    def frame_bytes(self) -> int:
        """Bytes of the decoded frames."""
        return 3 * FLOAT32_BYTES * self.request.num_frames * self.request.height * self.request.width

    @property
    def words(self) -> int:
        """Tokens of cross-attention: text, and patches of an image."""
        states = 0 if self.image is None else self.image.num_patches + 1
        return self.settings.text_tokens + (self.transformer.image_positions or states)

    @property
    def condition_channels(self) -> int:
        """Channels of the condition, which follow the channels of the latents or are VACE's."""
        config = self.transformer
        return config.vace_in_dim if config.vace_layers else max(0, config.in_dim - self.vae.z_dim)


def read_clip(
    config: str | Path,
    *,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    devices: int | None = None,
    guidance_parallel: bool = False,
    sequence_parallel: int = 1,
    shard_weights: bool = False,
    **size: Any,
) -> Clip:
    """A clip of a model, checked. Missing parts of the model are the published ones.

    Args:
        config: folder of the model, or one of `WAN_CONFIGS`.
        dtype: `"bfloat16"` or `"float32"`, of transformer and encoders.
        quantization: as in `VideoPipeline`. Without it, weights are as in the files, or floats where there are none.
        size: `resolution`, `height`, `width`, `num_frames`, `num_inference_steps` and `half_size_steps`, as
            `VideoRequest` takes them.
    """
    check_dtype(dtype)
    if isinstance(config, str):
        transformer, folder = WAN_CONFIGS[config], None
        settings = named_settings(config)
    else:
        folder = VideoFolder(config)
        transformer = WanConfig.from_hf(folder.config("transformer"))
        settings = read_settings(folder, 1.0, kind=None, negative_prompts={})

    def part(name: str, published: Mapping[str, Any]) -> Mapping[str, Any]:
        return folder.config(name) if folder is not None and name in folder else published

    is_large_vae = transformer.out_dim == WanVaeConfig.from_hf(VAE_2_2).z_dim
    vae = WanVaeConfig.from_hf(part("vae", VAE_2_2 if is_large_vae else VAE))
    image = CLIPVisionConfig.from_hf(part("image_encoder", VIT_H14)) if transformer.image_dim is not None else None
    geometry = latent_geometry(transformer, vae)
    wanted = VideoRequest(**size)
    default = default_size(wanted, settings)
    request = ResolvedRequest(
        height=wanted.height or default[0],
        width=wanted.width or default[1],
        num_frames=wanted.num_frames or settings.num_frames,
        num_inference_steps=wanted.num_inference_steps or settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        half_size_steps=wanted.half_size_steps,
    )
    check_sizes(request, geometry)
    mesh: Any = clip_mesh(
        transformer,
        guidance_parallel=guidance_parallel,
        sequence_parallel=sequence_parallel,
        devices=devices,
        request=request,
        settings=settings,
        geometry=geometry,
        shard_weights=shard_weights,
        attached=False,
    )
    check_request(mesh, request, geometry)
    latents = geometry.shape(geometry.latents(request.num_frames), request.height, request.width)
    text = UMT5Config.from_hf(part("text_encoder", UMT5_XXL))
    small = request.phases(geometry)[0]
    half_size_tokens = latents[1] * small.height * small.width // geometry.pixels_per_token**2
    shared = (DTYPES[dtype], request, latents, half_size_tokens, mesh, shard_weights, quantization, folder)
    return Clip(transformer, vae, text, image, settings, *shared)


def components(clip: Clip) -> Components:
    """The models, as the devices of the clip hold them."""

    def part(
        name: str, what: str, kind: Any, config: Any, dtype: DTypeLike, *, keep: bool | None = None
    ) -> Component[Any]:
        folder = clip.folder
        options: Any = {"keep": keep, "mesh": clip.mesh, "shard_weights": clip.shard_weights}
        options["precision"] = network_precision(kind, clip.quantization)
        if folder is not None and stays_as_stored(folder, name, kind, dtype, clip.quantization):
            options["packed"] = lambda: folder.checkpoint(name).packed
        return divided_component(what, kind, config, dtype, lambda it: it, **options)

    experts = clip.settings.boundary_ratio is not None
    names = {"transformer": "high-noise transformer", "transformer_2": "low-noise transformer"}
    names = names if experts else {"transformer": "transformer"}
    keep = None if experts else True
    return Components(
        part("text_encoder", "text encoder", UMT5EncoderModel, clip.text, clip.dtype),
        None if clip.image is None else part("image_encoder", "image encoder", CLIPVisionModel, clip.image, clip.dtype),
        tuple(part(name, what, WanModel, clip.transformer, clip.dtype, keep=keep) for name, what in names.items()),
        part("vae", "video VAE", WanVae, clip.vae, clip.dtype, keep=True),
    )


def plan_video(model: Described, device: Device, **options: Any) -> dict[str, Any]:
    """Plan of a video model, as JSON holds it: one segment with guidance, all frames denoised together.

    See `read_clip` for arguments and errors.
    """
    clip = read_clip(model.config, **options)
    groups, size = axis_size(clip.mesh, GUIDANCE), axis_size(clip.mesh, SEQUENCE)
    with ops.use_target(device.platform, device.kind, device.memory, groups * size):
        models = components(clip)
    rows = _programs(clip, models, device)
    seconds = {row["name"]: row["at_least_s"] for row in rows}
    stages = _stages(clip, models)
    memory = add_residents((name, component, sum(held.values())) for name, component, held in stages)
    at = memory.index(largest(memory))
    parts = [model for model in (models.text_encoder, models.image_encoder, *models.transformers, models.vae) if model]
    kinds = [", ".join(sorted({leaf.dtype.name for leaf in model.shapes})) for model in parts]
    sizes = [(model.parameters, sum(map(nbytes_of, model.shapes)), model.size) for model in parts]
    return {
        "settings": {
            "dtype": jnp.dtype(clip.dtype).name,
            "quantization": clip.quantization,
            **{name: getattr(clip.request, name) for name in _SETTINGS},
            "guidance_parallel": groups > 1,
            "sequence_parallel": size,
            "shard_weights": clip.shard_weights,
        },
        "devices": groups * size,
        "weights": [Part(m.name, kind, *size)._asdict() for m, kind, size in zip(parts, kinds, sizes, strict=True)],
        "stages": [{**stage._asdict(), "together": stage.peak} for stage in memory],
        "memory": {"weights": memory[at].weights, "other models": memory[at].others, **stages[at][2]},
        "programs": rows,
        "at_least": {
            "seconds a step": seconds[STEP],
            "seconds a clip": sum(row["times"] * row["at_least_s"] for row in rows),
        },
        "fits": memory[at].peak <= device.memory,
    }


_Stage = tuple[str, Component[Any], Mapping[str, int]]
"""Name of a stage, its model, and bytes on a device in addition to weights, by name."""


def _stages(clip: Clip, models: Components) -> list[_Stage]:
    """Stages of a run, with the names of `verax video --plan`."""
    stages: list[_Stage] = [("text", models.text_encoder, {})]
    if models.image_encoder is not None:
        stages.append(("image", models.image_encoder, {}))
    if clip.condition_channels:
        stages.append(("encode", models.vae, {}))
    stages += [("denoise", transformer, _work(clip, transformer)) for transformer in models.transformers]
    return [*stages, ("decode", models.vae, {"frames": clip.frame_bytes})]


def _work(clip: Clip, transformer: Component[Any]) -> dict[str, int]:
    """Bytes on a device that denoising needs at least in addition to weights, by name.

    Guidance may run one row after the other, so that the activations of one row count.
    """
    config, size, itemsize = clip.transformer, math.prod(clip.latents[:-1]), jnp.dtype(clip.dtype).itemsize
    tokens = clip.tokens // axis_size(clip.mesh, SEQUENCE)
    keys = 2 * (config.num_layers + len(config.vace_layers)) * clip.words * config.dim * itemsize
    work = {
        "latents": FLOAT32_BYTES * size * (SOLVER_ARRAYS * clip.latents[-1] + clip.condition_channels),
        "cross-attention keys": GUIDED * keys // axis_size(clip.mesh, GUIDANCE),
        # With control blocks also their tokens, and what one of them adds.
        "residual stream": FLOAT32_BYTES * tokens * config.dim * (3 if config.vace_layers else 1),
        # Operands of self-attention, or of the second product of the feed-forward part.
        "largest operands": tokens * max(3 * config.dim, config.ffn_dim) * itemsize,
    }
    if clip.shard_weights:
        leaves = zip(transformer.shapes, transformer.partition, strict=True)
        stacks = [nbytes_of(leaf) for leaf, spec in leaves if any(spec)]
        work["largest gathered matrix"] = max(stacks) // config.num_layers
    return work


def _programs(clip: Clip, models: Components, device: Device) -> list[dict[str, Any]]:
    """Programs that take most of a clip's time, with their least times. Encoders take some hundredths of it."""
    work, transformer = _work(clip, models.transformers[0]), models.transformers[0]
    shapes: Any = transformer.shapes, models.vae.shapes
    dtype, devices = jnp.dtype(clip.dtype).name, 1 if clip.mesh is None else clip.mesh.size
    rounded = "int8" if rounds_inputs(transformer.module(shapes[0])) else dtype
    half = clip.request.half_size_steps
    steps = []
    for name, tokens, times in (
        (f"{STEP}, half size", clip.half_size_tokens, half),
        (STEP, clip.tokens, clip.request.num_inference_steps - half),
    ):
        weights, attention = step_flops(clip.transformer, tokens, clip.words)
        flops = Counter({dtype: GUIDED * attention})
        flops[rounded] += GUIDED * weights
        nbytes = transformer.size + work["latents"] * tokens // clip.tokens + work["cross-attention keys"]
        if times:
            steps.append(program_row(name, device, flops=flops, nbytes=nbytes, devices=devices, times=times))
    decode = program_row(
        "VAE decode",
        device,
        flops={dtype: decode_flops(models.vae.module(shapes[1]), clip.latents)},
        nbytes=models.vae.size + FLOAT32_BYTES * math.prod(clip.latents) + clip.frame_bytes,
        devices=devices,
    )
    return [*steps, decode]


def step_flops(config: WanConfig, tokens: int, words: int) -> tuple[int, int]:
    """Operations of the products of the transformer for one row: with its weights, and of attention."""
    D, F = config.dim, config.ffn_dim
    blocks = config.num_layers + len(config.vace_layers)
    weights = blocks * (6 * D + 2 * F) + config.patch**2 * (config.in_dim + config.out_dim)
    if controls := len(config.vace_layers):
        weights += config.patch**2 * config.vace_in_dim + (controls + 1) * D  # the last: projections of control blocks
    return 2 * tokens * D * weights, 4 * blocks * tokens * (tokens + words) * D


def decode_flops(vae: WanVae, latents: Sequence[int]) -> int:
    """Operations of the decoder's products for latents `[1, F, h, w, Z]`, without tiles, whose margins cost more."""
    _, frames, h, w, _ = latents
    pixels, flops = h * w, 0

    def convolve(*layers: Any) -> int:
        leaves = jax.tree.leaves(nnx.state(list(layers)))
        kernels = (leaf.size for leaf in leaves if leaf.ndim >= 4 and leaf.size > leaf.shape[0])  # no norm's factors
        return 2 * frames * pixels * sum(kernels)

    decoder, attention = vae.decoder, cast(AttentionBlock, vae.decoder.middle[1])
    flops += convolve(vae.conv2, decoder.conv1, *decoder.middle)
    flops += 4 * frames * pixels**2 * attention.proj.weight.shape[0]  # attention within a frame
    for layer in (one for level in decoder.upsamples for one in getattr(level, "upsamples", [level])):
        if not isinstance(layer, Upsample):
            flops += convolve(layer)
            continue
        if layer.time_conv is not None:  # makes two frames of each but the first
            frames -= 1
            flops += convolve(layer.time_conv)
            frames = 2 * frames + 1
        pixels *= 4
        flops += convolve(layer.resample)
    return flops + convolve(decoder.head)
