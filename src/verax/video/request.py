"""Requests for clips: `VideoRequest` as a user writes it, and `ResolvedRequest` with nothing left open."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from jaxtyping import UInt8

from verax.errors import InvalidParameterError
from verax.video.geometry import LatentGeometry, segment_sizes
from verax.video.options import VideoRequest
from verax.video.outputs import Callback
from verax.video.settings import RESOLUTIONS, VideoSettings

__all__ = ["ResolvedRequest", "VideoOptions", "VideoRequest", "default_size", "make_request"]


OVERLAP = 17
"""Default of frames that segments share: the smaller of the two that SkyReels-V2 recommends."""


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
