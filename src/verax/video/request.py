"""One request, checked before any device work: sizes that fit, a model of the right kind, nothing said twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verax.errors import InvalidParameterError
from verax.models.wan.layers import ATTENTION
from verax.video.geometry import LatentGeometry, segment_sizes
from verax.video.outputs import Callback
from verax.video.settings import RESOLUTIONS, VideoSettings

__all__ = ["VideoRequest", "make_request"]

OVERLAP = 17
"""Frames that segments share if nothing is said: the smaller of the two that SkyReels-V2 recommends."""

_ADDED_NOISE = 1000
"""Timesteps: all noise."""


@dataclass(frozen=True, kw_only=True)
class VideoRequest:
    """What `VideoPipeline` was asked, with its checkpoint's defaults filled in; see there for what each means."""

    prompt: str | Sequence[str] | None
    image: Any
    last_image: Any
    video: Any
    negative_prompt: str
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    shift: float
    fps: int
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
    causal_block_size: int
    causal_attention: bool
    overlap_history: int
    addnoise_condition: int
    base_num_frames: int
    attention: str
    resume: Any

    @property
    def guided(self) -> bool:
        """Whether the negative prompt has a say."""
        return self.guidance_scale > 1

    @property
    def program_options(self) -> dict[str, Any]:
        """What makes another program of the loop over steps."""
        return {
            "guidance": self.guidance if self.guided else None,
            "causal_block_size": self.causal_block_size if self.causal_attention else None,
            "attention": self.attention,
        }

    @property
    def prompts(self) -> tuple[str, ...]:
        """One for each segment; the last also for those after it."""
        return () if self.prompt is None else (self.prompt,) if isinstance(self.prompt, str) else tuple(self.prompt)

    def segments(self, geometry: LatentGeometry) -> list[int]:
        """Latent frames of each segment."""
        most, overlap = geometry.latents(self.base_num_frames), geometry.latents(self.overlap_history)
        return segment_sizes(geometry.latents(self.num_frames), most, overlap)


def make_request(settings: VideoSettings, geometry: LatentGeometry, reference: str, **given: Any) -> VideoRequest:
    """A request that can be served.

    Args:
        settings: the checkpoint's defaults, for what is None.
        geometry: its sizes.
        reference: whose rules.
        given: the fields of `VideoRequest`.

    Raises:
        InvalidParameterError: naming the argument that does not fit, and what would.
    """
    picture = given["image"] if given["video"] is None else given["video"][0]
    height, width = _size(given.pop("resolution"), settings, given)
    if given["height"] is None and given["width"] is None:
        height, width = _as_upright_as(picture, height, width)
    blocks = given["causal_block_size"]
    defaults = {
        "height": height,
        "width": width,
        **{name: getattr(settings, name) for name in ("num_inference_steps", "guidance_scale", "shift", "fps")},
        "num_frames": settings.num_frames,
        "base_num_frames": settings.num_frames,
        "negative_prompt": settings.negative_prompt,
        "causal_block_size": 1,
        # Diffusers attends by blocks as soon as there are any; the released models were not trained for it.
        "causal_attention": reference == "diffusers" and blocks is not None and blocks > 1,
        "overlap_history": OVERLAP,
    }
    request = VideoRequest(**{**given, **{name: value for name, value in defaults.items() if given[name] is None}})
    _check_choices(request)
    _check_numbers(request, geometry)
    _check_kind(request, settings)
    _check_arrays(request, geometry, reference)
    return request


def _size(resolution: str | None, settings: VideoSettings, given: dict[str, Any]) -> tuple[int, int]:
    """Height and width if neither is given."""
    if resolution is None:
        return settings.height, settings.width
    if given["height"] is not None or given["width"] is not None:
        raise InvalidParameterError("resolution: give it, or height and width, not both")
    if str(resolution).upper() not in RESOLUTIONS:
        raise InvalidParameterError(f"resolution: expected one of {', '.join(RESOLUTIONS)}, got {resolution!r}")
    return RESOLUTIONS[str(resolution).upper()]


def _as_upright_as(picture: np.ndarray | None, height: int, width: int) -> tuple[int, int]:
    """A size, turned if a picture `[H, W, 3]` is upright where it is not, or the other way round."""
    if picture is None or (picture.shape[0] > picture.shape[1]) == (height > width):
        return height, width
    return width, height


def _check_choices(request: VideoRequest) -> None:
    choices = {
        "output_type": ("video", "np", "latent"),
        "cache": (None, "teacache"),
        "guidance": ("auto", "batch", "sequential"),
        "attention": tuple(ATTENTION),
    }
    for name, known in choices.items():
        if (value := getattr(request, name)) not in known:
            raise InvalidParameterError(f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}")


def _check_numbers(request: VideoRequest, geometry: LatentGeometry) -> None:
    least = {"num_inference_steps": 1, "fps": 1, "seed": 0, "ar_step": 0, "causal_block_size": 1}
    for name in (*least, "height", "width", "num_frames", "base_num_frames", "overlap_history", "addnoise_condition"):
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least.get(name, 0):
            raise InvalidParameterError(
                f"{name}: expected a whole number of at least {least.get(name, 0)}, got {value!r}"
            )
    for name in ("guidance_scale", "shift", "cache_threshold"):
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


def _check_steps(name: str, value: int, step: int, offset: int) -> None:
    """`value` must be `step n + offset`, and more than none."""
    lower = (value - offset) // step * step + offset
    if value == lower and value > 0:
        return
    wanted = f"a multiple of {step}" if offset == 0 else f"{step}n + {offset}"
    nearest = [near for near in (lower, lower + step) if near > 0]
    raise InvalidParameterError(f"{name}: expected {wanted}, got {value}; nearest {' or '.join(map(str, nearest))}")


def _check_kind(request: VideoRequest, settings: VideoSettings) -> None:
    forcing = {
        "last_image": request.last_image is not None,
        "video": request.video is not None,
        "ar_step": request.ar_step > 0,
        "causal_block_size": request.causal_block_size > 1,
        "addnoise_condition": request.addnoise_condition > 0,
        "num_frames": request.num_frames > request.base_num_frames,
    }
    if settings.kind != "df":
        for name, used in forcing.items():
            if used:
                long = f" longer than base_num_frames, {request.base_num_frames}," if name == "num_frames" else ""
                raise InvalidParameterError(
                    f"{name}:{long} needs a model for diffusion forcing (SkyReels-V2-DF); this one is {settings.kind}"
                )
    if settings.kind == "t2v" and request.image is not None:
        raise InvalidParameterError("image: this model is for text alone; use one for image to video or forcing")
    if settings.kind == "i2v" and settings.needs_image and request.image is None:
        raise InvalidParameterError("image: this model is for image to video, and needs the first frame")
    if request.image is not None and request.video is not None:
        raise InvalidParameterError("image: give it or video, not both: each is how the clip begins")
    if request.video is not None and len(request.video) < request.overlap_history:
        raise InvalidParameterError(
            f"video: has {len(request.video)} frames, fewer than overlap_history, {request.overlap_history}"
        )
    if request.cache is not None and request.cache_threshold == 0:
        raise InvalidParameterError("cache_threshold: expected a number above 0, got 0")


def _check_arrays(request: VideoRequest, geometry: LatentGeometry, reference: str) -> None:
    if (request.prompt is None) == (request.prompt_embeds is None):
        raise InvalidParameterError("prompt: give it or prompt_embeds, one of the two")
    if request.prompt is not None and not request.prompts:
        raise InvalidParameterError("prompt: expected a text, or one for each segment, got none")
    for prompt in (*request.prompts, request.negative_prompt):
        if not isinstance(prompt, str):
            raise InvalidParameterError(f"prompt: expected a text, got {type(prompt).__name__}")
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        shape = getattr(getattr(request, name), "shape", None)
        if getattr(request, name) is not None and (shape is None or tuple(shape[::2]) != (1, geometry.text_width)):
            raise InvalidParameterError(
                f"{name}: expected an array [1, tokens, {geometry.text_width}], got shape {shape}"
            )
    sizes = request.segments(geometry)
    extra = [0] * (len(sizes) - 1) + [int(request.last_image is not None)]
    if (
        reference == "diffusers"
        and len(sizes) > 1
        and geometry.latents(request.overlap_history) % request.causal_block_size
    ):
        raise InvalidParameterError(
            f"overlap_history: {geometry.latents(request.overlap_history)} latent frames are not whole blocks of "
            f"{request.causal_block_size} (causal_block_size), which diffusers would cut off"
        )
    for size, more in zip(sizes, extra, strict=True):
        if (size + more) % request.causal_block_size:
            raise InvalidParameterError(
                f"causal_block_size: {size + more} latent frames in a segment{' with the last image' if more else ''} "
                f"cannot be cut into blocks of {request.causal_block_size}; choose num_frames, base_num_frames or "
                "overlap_history so that they can"
            )
    if request.latents is not None:
        pixels = geometry.pixels_per_latent
        wanted = (1, geometry.channels, sizes[0], request.height // pixels, request.width // pixels)
        if tuple(getattr(request.latents, "shape", ())) != wanted:
            got = getattr(request.latents, "shape", type(request.latents).__name__)
            raise InvalidParameterError(f"latents: expected an array of shape {list(wanted)}, got {got}")
