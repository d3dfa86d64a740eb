"""Checks of a request before any device work: sizes that fit, a model of the right kind, no contradictions."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np

from verax.errors import InvalidParameterError
from verax.models.wan.layers import ATTENTION
from verax.video import images
from verax.video.conditioning import CONDITIONINGS
from verax.video.geometry import LatentGeometry
from verax.video.request import OVERLAP, ResolvedRequest, VideoRequest, default_size
from verax.video.resume import check_resume
from verax.video.rules import ReferenceRules
from verax.video.settings import VideoSettings

__all__ = ["resolve_request"]

_ADDED_NOISE = 1000
"""Largest number of timesteps of added noise: noise alone."""


def resolve_request(
    request: VideoRequest, settings: VideoSettings, geometry: LatentGeometry, rules: ReferenceRules
) -> ResolvedRequest:
    """Read a request's images, fill in its defaults, and check it.

    Args:
        request: as the user wrote it.
        settings: kind and defaults of the checkpoint.
        geometry: sizes of the checkpoint.
        rules: rules of the reference.

    Raises:
        InvalidParameterError: naming the argument that does not fit, and values that would.
        MissingDependencyError: if an image or a clip needs Pillow or PyAV, and it is not installed.
    """
    values: dict[str, Any] = {field.name: getattr(request, field.name) for field in fields(request)}
    for name in ("image", "last_image"):
        if values[name] is not None:
            values[name] = images.read_image(values[name], name=name)
    if request.video is not None:
        values["video"] = images.read_clip(request.video)[0]
    if request.resume is not None:
        check_resume(request.resume)
    first_frame = values["image"] if values["video"] is None else values["video"][0]
    height, width = default_size(request, settings)
    if request.height is None and request.width is None:
        height, width = _oriented(first_frame, height, width)
    blocks = request.causal_block_size
    if settings.boundary_ratio is not None and request.guidance_scale_2 is None:
        second = settings.guidance_scale_2 if request.guidance_scale is None else request.guidance_scale
        values["guidance_scale_2"] = settings.guidance_scale if second is None else second
    defaults = {
        "height": height,
        "width": width,
        **{name: getattr(settings, name) for name in ("num_inference_steps", "guidance_scale", "shift", "fps")},
        "num_frames": settings.num_frames,
        "base_num_frames": settings.num_frames,
        "negative_prompt": settings.negative_prompt,
        "causal_block_size": 1,
        "causal_attention": rules.causal_attention and blocks is not None and blocks > 1,
        "overlap_history": OVERLAP,
    }
    values.update({name: value for name, value in defaults.items() if values[name] is None}, resolution=None)
    resolved = ResolvedRequest(**values)
    _check_choices(resolved)
    _check_numbers(resolved, geometry)
    _check_second_scale(resolved, settings)
    CONDITIONINGS[settings.kind].check(resolved, settings)
    _check_images(resolved)
    _check_texts(resolved, geometry)
    _check_segments(resolved, geometry, rules)
    return resolved


def _oriented(image: np.ndarray | None, height: int, width: int) -> tuple[int, int]:
    """Height and width, exchanged if one of frame and image `[H, W, 3]` is upright and the other is not."""
    if image is None or (image.shape[0] > image.shape[1]) == (height > width):
        return height, width
    return width, height


def _check_choices(request: ResolvedRequest) -> None:
    choices = {
        "output_type": ("video", "np", "latent"),
        "cache": (None, "teacache"),
        "guidance": ("auto", "batch", "sequential"),
        "attention": tuple(ATTENTION),
    }
    for name, known in choices.items():
        if (value := getattr(request, name)) not in known:
            raise InvalidParameterError(f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}")
    if request.cache is not None and request.cache_threshold == 0:
        raise InvalidParameterError("cache_threshold: expected a number above 0, got 0")


def _check_numbers(request: ResolvedRequest, geometry: LatentGeometry) -> None:
    least = {"num_inference_steps": 1, "fps": 1, "seed": 0, "ar_step": 0, "causal_block_size": 1}
    for name in (*least, "height", "width", "num_frames", "base_num_frames", "overlap_history", "addnoise_condition"):
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least.get(name, 0):
            raise InvalidParameterError(
                f"{name}: expected a whole number of at least {least.get(name, 0)}, got {value!r}"
            )
    second = () if request.guidance_scale_2 is None else ("guidance_scale_2",)
    for name in ("guidance_scale", *second, "shift", "cache_threshold"):
        value = getattr(request, name)
        if not isinstance(value, int | float | np.number) or not math.isfinite(value) or value < 0:
            raise InvalidParameterError(f"{name}: expected a number of at least 0, got {value!r}")
    for name in ("height", "width"):
        _check_steps(name, getattr(request, name), geometry.pixels_per_token, 0)
    for name in ("num_frames", "base_num_frames", "overlap_history"):
        _check_steps(name, getattr(request, name), geometry.frames_per_latent, 1)
    if request.addnoise_condition > _ADDED_NOISE:
        raise InvalidParameterError(
            f"addnoise_condition: expected at most {_ADDED_NOISE}, got {request.addnoise_condition}; 20 is usual"
        )


def _check_second_scale(request: ResolvedRequest, settings: VideoSettings) -> None:
    if request.guidance_scale_2 is None:
        return
    if settings.boundary_ratio is None:
        raise InvalidParameterError("guidance_scale_2: this model has one transformer; give guidance_scale alone")
    if request.guidance_scale_2 > 1 >= request.guidance_scale:
        raise InvalidParameterError(
            f"guidance_scale_2: expected at most 1 where guidance_scale is {request.guidance_scale:g}, which is no "
            f"guidance, got {request.guidance_scale_2:g}"
        )


def _check_steps(name: str, value: int, step: int, offset: int) -> None:
    """Raise unless `value` is `step n + offset`, and above 0."""
    lower = (value - offset) // step * step + offset
    if value == lower and value > 0:
        return
    expected = f"a multiple of {step}" if offset == 0 else f"{step}n + {offset}"
    nearest = [near for near in (lower, lower + step) if near > 0]
    raise InvalidParameterError(f"{name}: expected {expected}, got {value}; nearest {' or '.join(map(str, nearest))}")


def _check_images(request: ResolvedRequest) -> None:
    if request.video is None:
        return
    if request.image is not None:
        raise InvalidParameterError("image: give it or video, not both: each is how the clip begins")
    if len(request.video) < request.overlap_history:
        raise InvalidParameterError(
            f"video: has {len(request.video)} frames, fewer than overlap_history, {request.overlap_history}"
        )
    if request.num_frames <= request.overlap_history:
        raise InvalidParameterError(
            f"num_frames: expected more than the {request.overlap_history} frames of video that the clip begins with "
            f"(overlap_history), got {request.num_frames}"
        )


def _check_texts(request: ResolvedRequest, geometry: LatentGeometry) -> None:
    if (request.prompt is None) == (request.prompt_embeds is None):
        raise InvalidParameterError("prompt: give it or prompt_embeds, one of the two")
    if request.prompt is not None and not request.prompts:
        raise InvalidParameterError("prompt: expected a text, or one for each segment, got none")
    for prompt in (*request.prompts, request.negative_prompt):
        if not isinstance(prompt, str):
            raise InvalidParameterError(f"prompt: expected a text, got {type(prompt).__name__}")
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        states = getattr(request, name)
        shape = getattr(states, "shape", None)
        if states is not None and (shape is None or tuple(shape[::2]) != (1, geometry.text_width)):
            raise InvalidParameterError(
                f"{name}: expected an array [1, tokens, {geometry.text_width}], got shape {shape}"
            )


def _check_segments(request: ResolvedRequest, geometry: LatentGeometry, rules: ReferenceRules) -> None:
    sizes, block = request.segments(geometry), request.causal_block_size
    overlap = geometry.latents(request.overlap_history)
    if not rules.keep_partial_blocks and len(sizes) > 1 and overlap % block:
        raise InvalidParameterError(
            f"overlap_history: {overlap} latent frames are not whole blocks of {block} (causal_block_size), which "
            f"{rules.name} would cut off"
        )
    last = [0] * (len(sizes) - 1) + [int(request.last_image is not None)]
    for size, more in zip(sizes, last, strict=True):
        if (size + more) % block:
            raise InvalidParameterError(
                f"causal_block_size: {size + more} latent frames in a segment{' with the last image' if more else ''} "
                f"cannot be cut into blocks of {block}; choose num_frames, base_num_frames or overlap_history so that "
                "they can"
            )
    if request.latents is None:
        return
    _, F, h, w, C = geometry.shape(sizes[0], request.height, request.width)
    if tuple(getattr(request.latents, "shape", ())) != (1, C, F, h, w):
        got = getattr(request.latents, "shape", type(request.latents).__name__)
        raise InvalidParameterError(f"latents: expected an array of shape {[1, C, F, h, w]}, got {got}")
