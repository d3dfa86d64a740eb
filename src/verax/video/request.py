"""Requests for clips: `VideoRequest` as a user writes it, and `ResolvedRequest` with nothing left open."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from jaxtyping import UInt8

from verax.errors import InvalidParameterError
from verax.video.geometry import LatentGeometry, segment_sizes
from verax.video.outputs import Callback
from verax.video.settings import RESOLUTIONS, VideoSettings

__all__ = ["ResolvedRequest", "VideoOptions", "VideoRequest", "default_size", "make_request"]


OVERLAP = 17
"""Default of frames that segments share: the smaller of the two that SkyReels-V2 recommends."""


@dataclass(frozen=True, eq=False)
class VideoRequest:
    """A clip to be made by `VideoPipeline.generate`. An option that is None has the checkpoint's value (`settings`).

    A request is checked when a pipeline takes it: what fits depends on the checkpoint.

    Attributes:
        prompt: description of the clip; a list has one for each segment of a long clip, the last for all that follow.
        image: first frame: a path, a PIL.Image, or an array `[H, W, 3]` (uint8, or floats from 0 to 1).
        last_image: last frame, likewise; diffusion forcing only.
        video: clip to continue: a path, a list of images, or an array `[T, H, W, 3]`; diffusion forcing only. The
            result begins with it, and `num_frames` counts from the first of its last `overlap_history` frames.
        negative_prompt: description of what the clip should not show; unused where `guidance_scale` is 1 or less.
        height, width: size of a frame in pixels, multiples of 16; of 32 for Wan2.2's 5B. If both are None and the
            image is upright, so is the clip.
        resolution: `"540P"` (544 x 960) or `"720P"` (720 x 1280) in place of height and width.
        num_frames: number of frames, 4n + 1. More than `base_num_frames` are made in segments.
        num_inference_steps: steps of the solver.
        guidance_scale: scale of classifier-free guidance; 1 or less for none.
        guidance_scale_2: scale with the second of two transformers, where noise is low; `guidance_scale` if only that
            is given.
        shift: shift of the noise levels towards noise, see `sigmas.noise_levels`.
        fps: frames per second: of the file, and as an input of models that have one.
        seed: seed of the noise. The same seed gives the same clip.
        latents: initial noise of the first segment, `[1, channels, F, h, w]`: `[1, 16, F, height / 8, width / 8]`, and
            `[1, 48, F, height / 16, width / 16]` for Wan2.2's 5B.
        prompt_embeds, negative_prompt_embeds: states `[1, tokens, width]` of the text encoder in place of prompts.
        output_type: `"video"` (uint8), `"np"` (float32 from 0 to 1), or `"latent"`.
        callback: function that is called after every step, see `VideoProgress`; the run ends if it returns False.
        cache: `"teacache"` to skip the transformer's blocks in steps that change little.
        cache_threshold: threshold of TeaCache, see `teacache.steps_running_blocks`.
        guidance: `"batch"` for prompt and negative prompt together, `"sequential"` for one after the other, in less
            memory; `"auto"` for the first that fits.
        ar_step: diffusion forcing: steps by which a block is behind the one before it; 0 for all together.
        causal_block_size: diffusion forcing: latent frames in a block; every segment must be whole blocks.
        causal_attention: True if a block sees earlier blocks only. No released model was trained for it; diffusers does
            it whenever there are blocks, and so does `reference="diffusers"`.
        overlap_history: frames that segments share, 4n + 1.
        addnoise_condition: diffusion forcing: timesteps of noise, of 1000, that are added to prefix frames where the
            model sees them: 20 hides seams.
        base_num_frames: frames of a segment, 4n + 1.
        attention: an implementation of `wan.layers.ATTENTION`.
        resume: a .safetensors file in which finished segments are kept, and from which they are taken if it exists: the
            same request then continues where it ended, also with other prompts for later segments, or more frames.
    """

    prompt: str | Sequence[str] | None = None
    _: KW_ONLY
    image: Any = None
    last_image: Any = None
    video: Any = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    resolution: str | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    shift: float | None = None
    fps: int | None = None
    seed: int = 42
    latents: Any = None
    prompt_embeds: Any = None
    negative_prompt_embeds: Any = None
    output_type: str = "video"
    callback: Callback | None = None
    cache: str | None = None
    cache_threshold: float = 0.2
    guidance: str = "auto"
    ar_step: int = 0
    causal_block_size: int | None = None
    causal_attention: bool | None = None
    overlap_history: int | None = None
    addnoise_condition: int = 0
    base_num_frames: int | None = None
    attention: str = "auto"
    resume: str | Path | None = None

    @property
    def prompts(self) -> tuple[str, ...]:
        """Prompts of the segments; the last also of those after it."""
        return () if self.prompt is None else (self.prompt,) if isinstance(self.prompt, str) else tuple(self.prompt)


class VideoOptions(TypedDict, total=False):
    """Types of the options of `VideoRequest`, for calls by keyword."""

    image: Any
    last_image: Any
    video: Any
    negative_prompt: str | None
    height: int | None
    width: int | None
    resolution: str | None
    num_frames: int | None
    num_inference_steps: int | None
    guidance_scale: float | None
    guidance_scale_2: float | None
    shift: float | None
    fps: int | None
    seed: int
    latents: Any
    prompt_embeds: Any
    negative_prompt_embeds: Any
    output_type: str
    callback: Callback | None
    cache: str | None
    cache_threshold: float
    guidance: str
    ar_step: int
    causal_block_size: int | None
    causal_attention: bool | None
    overlap_history: int | None
    addnoise_condition: int
    base_num_frames: int | None
    attention: str
    resume: str | Path | None


def make_request(prompt: str | Sequence[str] | None, options: Mapping[str, Any]) -> VideoRequest:
    """Build a request from the arguments of a call.

    Raises:
        InvalidParameterError: for an option that requests do not have, with the nearest name.
    """
    known = [field.name for field in fields(VideoRequest)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; options are {', '.join(known[1:])}"
            raise InvalidParameterError(f"{name}: not an option of a request{hint}")
    return VideoRequest(prompt, **options)


def default_size(request: VideoRequest, settings: VideoSettings) -> tuple[int, int]:
    """Height and width of a request that gives neither, as long as it has no image.

    Raises:
        InvalidParameterError: for a resolution that there is not, or one beside a height or a width.
    """
    if request.resolution is None:
        return settings.height, settings.width
    if request.height is not None or request.width is not None:
        raise InvalidParameterError("resolution: give it, or height and width, not both")
    name = str(request.resolution).upper()
    if name not in RESOLUTIONS:
        raise InvalidParameterError(f"resolution: expected one of {', '.join(RESOLUTIONS)}, got {request.resolution!r}")
    return RESOLUTIONS[name]


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedRequest(VideoRequest):
    """A checked request: defaults are filled in, images and clips are arrays. Made by `resolve.resolve_request`."""

    image: UInt8[np.ndarray, "H W 3"] | None = None
    last_image: UInt8[np.ndarray, "H W 3"] | None = None
    video: UInt8[np.ndarray, "T H W 3"] | None = None
    negative_prompt: str = VideoSettings.negative_prompt
    height: int = VideoSettings.height
    width: int = VideoSettings.width
    num_frames: int = VideoSettings.num_frames
    num_inference_steps: int = VideoSettings.num_inference_steps
    guidance_scale: float = VideoSettings.guidance_scale
    guidance_scale_2: float | None = None
    shift: float = VideoSettings.shift
    fps: int = VideoSettings.fps
    causal_block_size: int = 1
    causal_attention: bool = False
    overlap_history: int = OVERLAP
    base_num_frames: int = VideoSettings.num_frames

    @property
    def guided(self) -> bool:
        """True if classifier-free guidance is used, and so the negative prompt."""
        return self.guidance_scale > 1

    @property
    def guidance_scales(self) -> tuple[float, float]:
        """Scales with the first and with the second transformer of a pipeline, which may have one."""
        second = self.guidance_scale if self.guidance_scale_2 is None else self.guidance_scale_2
        return self.guidance_scale, second

    @property
    def rows(self) -> int:
        """Rows of the transformer's batch: the prompt and, with guidance, the negative prompt."""
        return 1 + self.guided

    @property
    def program_options(self) -> dict[str, Any]:
        """Options of the program of the loop over steps, which is compiled for each of their values."""
        return {
            "guidance": self.guidance if self.guided else None,
            "causal_block_size": self.causal_block_size if self.causal_attention else None,
            "attention": self.attention,
        }

    def segments(self, geometry: LatentGeometry) -> list[int]:
        """Latent frames of each segment, including those that it shares with the segment before."""
        most, overlap = geometry.latents(self.base_num_frames), geometry.latents(self.overlap_history)
        return segment_sizes(geometry.latents(self.num_frames), most, overlap)

    @property
    def continued_frames(self) -> int:
        """Frames of the user's clip with which the first segment begins."""
        return 0 if self.video is None else self.overlap_history
