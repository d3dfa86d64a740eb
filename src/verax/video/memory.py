"""What a run will need, stage by stage, by the compiled programs' own account, before anything is read or run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from verax.models.wan.model import WanConfig
from verax.video.denoise import Conditions, Denoiser, Tables
from verax.video.geometry import LatentGeometry
from verax.video.programs import Component, Memory
from verax.video.request import VideoRequest
from verax.video.settings import VideoSettings
from verax.video.stages import Stages

__all__ = ["StageMemory", "format_bytes", "free_memory", "largest", "out_of_memory_message", "plan_memory"]


SPARE = 0.9
"""Of the memory that fewer or smaller frames would have: the rest is for what does not shrink with them."""


class StageMemory(NamedTuple):
    """Bytes of one stage."""

    stage: str
    weights: int
    """Of the model that runs."""
    others: int
    """Of models that are on the device meanwhile."""
    work: int
    """Inputs, results and what is needed in between."""

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.others + self.work


def plan_memory(
    request: VideoRequest,
    tables: Tables,
    *,
    settings: VideoSettings,
    geometry: LatentGeometry,
    reference: str,
    stages: Stages,
    denoiser: Denoiser,
) -> list[StageMemory]:
    """The stages of a request's largest segment, in their order.

    Compiles what the run will need, which the run then finds compiled.

    Args:
        request: checked.
        tables: of its largest segment.
        settings, geometry, reference: its pipeline's.
        stages, denoiser: where it will run.
    """
    config: WanConfig = stages.transformer.config
    rows = 1 + request.guided
    sizes = request.segments(geometry)
    size = max(sizes) + (request.last_image is not None)
    h, w = request.height // geometry.pixels_per_latent, request.width // geometry.pixels_per_latent
    chunk = stages.chunk(request.height, request.width)
    found: list[StageMemory] = []
    resident: dict[str, int] = {}

    def add(stage: str, component: Component[Any], memory: Memory) -> None:
        others = sum(size for name, size in resident.items() if name != component.name)
        found.append(StageMemory(stage, component.size, others, memory.peak - component.size))
        if component.keep:
            resident[component.name] = component.size

    encoder = stages.text_encoder
    if request.prompt is not None or (request.guided and request.negative_prompt_embeds is None):
        tokens = jax.ShapeDtypeStruct((1, settings.text_tokens), jnp.int32)
        add("text", encoder, stages.text_program.memory(encoder.shapes, tokens, jax.ShapeDtypeStruct((1,), jnp.int32)))
    states: Any = None
    image_condition: Any = None
    if stages.image_encoder is not None and stages.image_program is not None:
        encoder = stages.image_encoder
        pixels = _floats(1, encoder.config.image_size, encoder.config.image_size, 3)
        if request.image is not None:
            add("image", encoder, stages.image_program.memory(encoder.shapes, pixels))
        states = _floats(rows, 1 + encoder.config.num_patches, encoder.config.hidden_size)
        image_condition = _floats(1, size, h, w, config.in_dim - geometry.channels)
    weights = stages.vae.shapes
    prefix_frames = 0 if request.video is None else request.overlap_history
    if settings.kind == "i2v" and request.image is not None:
        picture = jax.ShapeDtypeStruct((1, request.height, request.width, 3), jnp.uint8)
        options = {"frames": request.num_frames, "chunk": chunk}
        add("encode", stages.vae, stages.condition_program.memory(weights, picture, **options))
    elif prefix_frames or request.image is not None or request.last_image is not None:
        clip = jax.ShapeDtypeStruct((1, max(prefix_frames, 1), request.height, request.width, 3), jnp.uint8)
        add("encode", stages.vae, stages.encode_program.memory(weights, clip, chunk=chunk))
    noisy = request.addnoise_condition > 0 and (request.image is not None or prefix_frames > 0 or len(sizes) > 1)
    tokens = settings.text_tokens if request.prompt_embeds is None else request.prompt_embeds.shape[1]
    context_arguments = stages.transformer.shapes, _floats(rows, tokens, geometry.text_width), states
    conditions = Conditions(
        context=stages.context_program.results(*context_arguments),
        image_condition=image_condition,
        fps=np.zeros(1, np.int32) if config.inject_sample_info else None,
        guidance_scale=np.zeros((), np.float32),
        prefix_mask=np.zeros(size, bool) if noisy else None,
        added_noise=np.zeros((), np.int32),
        key=jax.random.key(0),
    )
    latents = _floats(1, size, h, w, geometry.channels)
    cached = request.cache is not None
    carry = jax.eval_shape(lambda noise: denoiser.start(noise, guided=request.guided, cached=cached), latents)
    arguments = (stages.transformer.shapes, carry, tables, conditions, np.int32(0), np.int32(0))
    add("denoise", stages.transformer, denoiser.program.memory(*arguments, **request.program_options))
    # Diffusers' pipelines share latents between segments, and decode all as one clip.
    again = len(sizes) > 1 and reference != "diffusers"
    if request.output_type != "latent" or again:
        whole = geometry.latents(request.num_frames) if reference == "diffusers" else max(sizes)
        latents = _floats(1, whole, h, w, geometry.channels)
        at_once = stages.decoding(request.height, request.width)
        add("decode", stages.vae, stages.decode_program.memory(weights, latents, **at_once))
    if again:
        clip = _floats(1, request.overlap_history, request.height, request.width, 3)
        add("encode again", stages.vae, stages.encode_program.memory(weights, clip, chunk=chunk))
    return found


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def largest(plan: Sequence[StageMemory]) -> StageMemory:
    """The stage that needs most."""
    return max(plan, key=lambda stage: stage.peak)


def free_memory(stages: Stages) -> int | None:
    """Bytes that a run may take on JAX's default device, with the models that are there; None if it does not tell."""
    components = (stages.text_encoder, stages.image_encoder, stages.transformer, stages.vae)
    ours = sum(one.size for one in components if one is not None and one.loaded)
    if jax.default_backend() == "cpu":
        return psutil.virtual_memory().available + ours
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else limit - stats.get("bytes_in_use", 0) + ours


def _alternatives(
    request: VideoRequest, geometry: LatentGeometry, plan: Sequence[StageMemory], free: int
) -> list[dict[str, int | str]]:
    """Changes to a request that does not fit which may make it fit, the least loss first.

    Fewer frames and smaller ones are guessed from what a latent takes, with something to spare.
    """
    found: list[dict[str, int | str]] = []
    if request.guided and request.guidance == "batch":
        found.append({"guidance": "sequential"})
    if request.attention not in ("auto", "flash"):
        found.append({"attention": "flash"})
    # Of the stage that is furthest beyond its share.
    share = min((free - one.weights - one.others) / one.work for one in plan) * SPARE
    if share <= 0:
        return found
    name = "base_num_frames" if len(request.segments(geometry)) > 1 else "num_frames"
    size = geometry.latents(getattr(request, name))
    block = request.causal_block_size
    fewer = int(size * share) // block * block
    if fewer > (geometry.latents(request.overlap_history) if name == "base_num_frames" else 0):
        found.append({name: (fewer - 1) * geometry.frames_per_latent + 1})
    step = geometry.pixels_per_token
    height, width = (int(side * share**0.5) // step * step for side in (request.height, request.width))
    if min(height, width) > 0:
        found.append({"height": height, "width": width})
    return found


def out_of_memory_message(
    request: VideoRequest,
    geometry: LatentGeometry,
    plan: Sequence[StageMemory],
    free: int,
    replan: Callable[[Mapping[str, Any]], Sequence[StageMemory]],
) -> str | None:
    """Why a request cannot be served in the memory that is free, and what could; None if it can.

    Args:
        request: with its defaults filled in.
        geometry: its checkpoint's.
        plan: what it needs.
        free: bytes.
        replan: the plan with some changes.
    """
    most = largest(plan)
    if most.peak <= free:
        return None
    fit: list[str] = []
    for change in _alternatives(request, geometry, plan, free):
        peak = largest(replan(change)).peak
        if peak <= free:
            fit.append(f"{', '.join(f'{name}={value!r}' for name, value in change.items())} ({format_bytes(peak)})")
    if max(one.peak - one.others for one in plan) <= free:
        fit.append("offload=True")
    parts = (("weights", most.weights), ("other models", most.others), ("work", most.work))
    needs = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    advice = f"these would fit: {'; '.join(fit)}" if fit else "neither fewer nor smaller frames would fit"
    return (
        f"memory: {most.stage} needs {format_bytes(most.peak)} ({needs}), and {format_bytes(free)} are free; {advice}"
    )


def format_bytes(size: int) -> str:
    """Bytes, for people."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
