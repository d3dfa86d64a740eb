"""Facts about a video model's folder, for `verax info`. It reads settings only: no weights, and no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from verax.checkpoint.video.folder import VideoFolder
from verax.video.load import load_components
from verax.video.settings import read_settings

__all__ = ["describe_folder"]


def describe_folder(model: str | Path) -> dict[str, Any]:
    """Kind, defaults and parts of a video model; a part's value is its number of parameters.

    Raises:
        CheckpointError: if a part's settings are missing or damaged.
        UnsupportedModelError: if verax has no such model, or the parts do not fit each other.
    """
    opened = VideoFolder(model)
    settings = read_settings(opened, opened.flow_shift, kind=None, negative_prompts={})
    experts = settings.boundary_ratio is not None
    found = load_components(
        opened, jnp.bfloat16, experts=experts, keep_encoders=None, offload=False, lora={}, show_progress=False
    )
    transformer, vae = found.transformers[0].config, found.vae.config
    components = (found.text_encoder, found.image_encoder, *found.transformers, found.vae)
    return {
        "path": str(opened.path),
        "layout": opened.layout,
        "kind": settings.kind,
        "clip": f"{settings.num_frames} frames of {settings.height} x {settings.width}",
        "transformer": f"{transformer.num_layers} layers of {transformer.dim}, {transformer.num_heads} heads",
        **({"boundary_ratio": settings.boundary_ratio} if experts else {}),
        "latents": f"{vae.z_dim} channels for {vae.frames_per_latent} frames of {vae.pixels_per_latent} x "
        f"{vae.pixels_per_latent} pixels",
        "parameters": {one.name: one.parameters for one in components if one is not None},
    }
