"""Requests for clips: `VideoRequest` as a user writes it, and `ResolvedRequest` with nothing left open.

`resolve_request` fills in what a request leaves open, and checks it before any device work: sizes that fit, a model of
the right kind, no contradictions.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from verax.errors import InvalidParameterError
from verax.models.video_model import LatentGeometry, VideoModel, VideoSettings
from verax.options import options_of
from verax.video import images
from verax.video.files import check_parent
from verax.video.options import VideoRequest
from verax.video.recipes import with_recipe

_log = logging.getLogger("verax.video")

OVERLAP = 17
"""Default of frames that segments share: the smaller of the two that SkyReels-V2 recommends."""

_CACHES: Mapping[str | None, Mapping[str, float]] = {
    None: {},
    "teacache": {"cache_threshold": 0.2},
    # The threshold of the authors' command for Wan 2.1, and the others of diffusers' `MagCacheConfig`.
    "magcache": {"cache_threshold": 0.12, "cache_max_skip_steps": 3, "cache_retention_ratio": 0.2},
}
"""Defaults of the options of each cache."""

MOST_ASPECT = 100
"""Times that one side of a picture may be as long as the other."""

RESOLUTIONS = {"540P": (544, 960), "720P": (720, 1280)}
"""Height and width in pixels by name."""


def make_request(prompt: str | Sequence[str] | None, options: Mapping[str, Any]) -> VideoRequest:
    """Build a request from the arguments of a call."""
    known = list(options_of(VideoRequest))
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; options are {', '.join(known[1:])}"
            raise InvalidParameterError(f"{name}: not an option of a request{hint}")
    return VideoRequest(prompt, **options)


def segment_sizes(latents: int, longest: int, overlap: int) -> list[int]:
    """Latent frames of each segment, including those that it shares with the segment before. The last may be shorter.

    `overlap`: latent frames that two segments share.
    """
    if latents <= longest:
        return [latents]
    if overlap >= longest:
        raise InvalidParameterError(
            f"overlap_history: {overlap} latent frames, which is all of a segment's {longest} (base_num_frames)"
        )
    sizes = [longest]
    while (left := latents - len(sizes) * (longest - overlap) - overlap) > 0:
        sizes.append(min(left + overlap, longest))
    return sizes


def default_size(request: VideoRequest, settings: VideoSettings) -> tuple[int, int]:
    """Height and width of a request that gives neither, as long as it has no image."""
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
    """A checked request: defaults are filled in, images and clips are arrays. Made by `resolve_request`."""

    image: UInt8[np.ndarray, "H W 3"] | None = None
    last_image: UInt8[np.ndarray, "H W 3"] | None = None
    video: UInt8[np.ndarray, "T H W 3"] | None = None
    mask: UInt8[np.ndarray, "T H W 3"] | None = None
    reference_images: tuple[np.ndarray, ...] = ()
    conditioning_scale: tuple[float, ...] | None = None
    controls: bool = False
    """True if `video` is a control clip, False if it is continued."""
    negative_prompt: str = VideoSettings.negative_prompt
    height: int = VideoSettings.height
    width: int = VideoSettings.width
    num_frames: int = VideoSettings.num_frames
    num_inference_steps: int = VideoSettings.num_inference_steps
    guidance_scale: float = VideoSettings.guidance_scale
    guidance_scale_2: float | None = None
    shift: float = VideoSettings.shift
    solver: str = VideoSettings.solver
    sigmas: tuple[float, ...] | None = None
    cache_ratios: np.ndarray | None = None
    """MagCache's curve for the request's steps, `[R, G]`; see `caches.with_cache`."""
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
        longest, overlap = geometry.latents(self.base_num_frames), geometry.latents(self.overlap_history)
        return segment_sizes(geometry.latents(self.num_frames), longest, overlap)

    def phases(self, geometry: LatentGeometry) -> tuple[ResolvedRequest, ...]:
        """Requests of the sizes of its steps: itself, after itself at half size if its first steps are.

        Half a side is rounded down to whole tokens.
        """
        if not self.half_size_steps:
            return (self,)
        token = geometry.pixels_per_token
        height, width = (side // (2 * token) * token for side in (self.height, self.width))
        return replace(self, height=height, width=width), self

    @property
    def continued_frames(self) -> int:
        """Frames of the user's clip with which the first segment begins."""
        return 0 if self.video is None or self.controls else self.overlap_history


def resolve_request(request: VideoRequest, model: VideoModel, *, follow_picture: bool = True) -> ResolvedRequest:
    """Read a request's images, fill in its defaults, and check it.

    Args:
        model: checkpoint whose defaults are filled in, and which the request has to fit.
        follow_picture: False for frames of the usual size, turned at most, where the model's rules have it after the
            picture's.
    """
    settings, geometry = model.settings, model.geometry
    request = with_recipe(request)
    values = {name: declared.check(getattr(request, name)) for name, declared in options_of(VideoRequest).items()}
    values["prompt"] = _read_prompts(request.prompt)
    if request.callback is not None and not callable(request.callback):
        raise InvalidParameterError(f"callback: expected a function, got {type(request.callback).__name__}")
    for name in ("image", "last_image"):
        if values[name] is not None:
            values[name] = images.read_image(values[name], name=name)
    for name in ("latents", "prompt_embeds", "negative_prompt_embeds"):
        if hasattr(values[name], "__array__"):
            values[name] = array = images.as_array(values[name], name)
            if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer)):
                raise InvalidParameterError(f"{name}: expected an array of floats, got {array.dtype}")
    if request.video is not None:
        values["video"], rate = images.read_clip(request.video, limit=_control_frames(values["num_frames"], model))
        values["fps"] = _own_rate(rate, values["fps"])
    values |= _read_control(request, model, values["video"])
    if request.resume is not None:
        _check_resume(request.resume)
    first_frame = values["image"] if values["video"] is None else values["video"][0]
    height, width = default_size(request, settings)
    if request.height is None and request.width is None:
        size_of = model.rules.frame_sizes.get(settings.kind) if follow_picture else None
        if size_of is None or first_frame is None:
            height, width = oriented(first_frame, height, width)
        else:
            height, width = size_of(first_frame.shape[:2], (height, width))
    values["sigmas"] = _read_sigmas(request.sigmas, values["num_inference_steps"])
    if values["sigmas"] is not None:
        values["num_inference_steps"] = len(values["sigmas"])
    if request.cache_curve is not None:
        values["cache_curve"] = str(request.cache_curve)
    blocks = request.causal_block_size
    if settings.boundary_ratio is not None and request.guidance_scale_2 is None:
        second = settings.guidance_scale_2 if request.guidance_scale is None else request.guidance_scale
        values["guidance_scale_2"] = settings.guidance_scale if second is None else second
    defaults = {
        "height": height,
        "width": width,
        **{
            name: getattr(settings, name)
            for name in ("num_inference_steps", "guidance_scale", "shift", "solver", "fps")
        },
        "num_frames": _default_frames(values["video"], model),
        "base_num_frames": settings.num_frames,
        "negative_prompt": settings.negative_prompt,
        "causal_block_size": 1,
        "causal_attention": model.rules.causal_attention and blocks is not None and blocks > 1,
        "overlap_history": OVERLAP,
        **_CACHES[request.cache],
    }
    values.update({name: value for name, value in defaults.items() if values[name] is None}, resolution=None)
    resolved = ResolvedRequest(**values)
    check_sizes(resolved, geometry)
    _check_second_scale(resolved, settings)
    _check_conditioning(resolved, model)
    _check_images(resolved)
    _check_texts(resolved, model)
    _check_segments(resolved, model)
    return resolved


def _read_prompts(prompt: Any) -> str | tuple[str, ...] | None:
    """Prompts of a request, which may be an iterator: they are read once."""
    if prompt is None or isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Iterable):
        raise InvalidParameterError(
            f"prompt: expected a text, or a list of one for each segment, got {type(prompt).__name__}"
        )
    return tuple(prompt)


def _numbers(values: Any) -> np.ndarray:
    """Array of a number, of a list of them, or of a text of some with commas; empty if it is something else."""
    try:
        return np.array(values.split(",") if isinstance(values, str) else values, np.float64)
    except (TypeError, ValueError):
        return np.zeros(0)


def _read_sigmas(sigmas: Any, steps: int | None) -> tuple[float, ...] | None:
    """Noise levels of a request, of which there are as many as steps."""
    if sigmas is None:
        return None
    levels = _numbers(sigmas)
    if levels.ndim != 1 or not levels.size or not (np.diff(levels, prepend=1 + 1e-9, append=0.0) < 0).all():
        raise InvalidParameterError(f"sigmas: expected falling numbers of more than 0 and at most 1, got {sigmas!r}")
    if steps not in (None, len(levels)):
        raise InvalidParameterError(f"num_inference_steps: {steps}, but there are {len(levels)} sigmas; leave one out")
    return tuple(levels.tolist())


def _read_control(request: VideoRequest, model: VideoModel, video: np.ndarray | None) -> dict[str, Any]:
    """Fields of a resolved request that only a model with control layers (VACE) has; refuses them for others."""
    layers, pictures = model.conditioning.control_layers, request.reference_images
    if not layers:
        for name in ("mask", "reference_images", "conditioning_scale"):
            value = getattr(request, name)
            left_out = isinstance(value, tuple | list) and not value and name != "mask"
            if value is not None and not left_out:
                raise InvalidParameterError(f"{name}: needs a VACE model (such as Wan2.1-VACE); {_this_is(model)}")
        return {"reference_images": ()}
    if pictures is None or isinstance(pictures, str) or not isinstance(pictures, Sequence):
        pictures = () if pictures is None else (pictures,)
    limit = _control_frames(request.num_frames, model)
    mask = None if request.mask is None else images.read_clip(request.mask, name="mask", limit=limit)[0]
    if mask is not None and video is None:
        raise InvalidParameterError("mask: needs the video whose parts it shows")
    if mask is not None and video is not None:
        if mask.shape[1:] != video.shape[1:] or len(mask) not in (1, len(video)):
            (t, h, w), (T, H, W) = mask.shape[:3], video.shape[:3]
            raise InvalidParameterError(
                f"mask: has {t} frames of {h} x {w}, and video {T} of {H} x {W}; give masks of the same size, one for "
                "each frame, or one for all"
            )
        mask = np.broadcast_to(mask, video.shape)
    return {
        "mask": mask,
        "reference_images": tuple(images.read_image(picture, name="reference_images") for picture in pictures),
        "conditioning_scale": _read_scales(request.conditioning_scale, layers),
        "controls": True,
    }


def _read_scales(scale: Any, layers: int) -> tuple[float, ...]:
    """Scale of each control layer."""
    scales = _numbers(1.0 if scale is None else scale)
    if scales.ndim > 1 or scales.size not in (1, layers) or not np.isfinite(scales).all():
        raise InvalidParameterError(
            f"conditioning_scale: expected a number, or one for each of the {layers} control layers, got {scale!r}"
        )
    return tuple(np.broadcast_to(scales.reshape(-1), layers).tolist())


def _control_frames(num_frames: int | None, model: VideoModel) -> int | None:
    """Number of frames that are used of a control clip, which may be an hour long; None if all are."""
    return max(1, num_frames or model.settings.num_frames) if model.conditioning.control_layers else None


def _default_frames(video: np.ndarray | None, model: VideoModel) -> int:
    """Frames of a clip: the checkpoint's number, or fewer if a control clip has no more."""
    frames, step = model.settings.num_frames, model.geometry.frames_per_latent
    if video is None or not model.conditioning.control_layers:
        return frames
    return min(frames, (len(video) - 1) // step * step + 1)


def _this_is(model: VideoModel) -> str:
    return f"this one is {model.settings.kind}"


def _own_rate(rate: float | None, fps: int | None) -> int | None:
    """Frames per second of a clip that continues a user's; a warning says if that is then faster or slower."""
    if rate is None:
        return fps
    chosen = max(1, round(rate)) if fps is None else fps
    if abs(chosen - rate) > 0.005 * rate:
        speed = "faster" if chosen > rate else "slower"
        _log.warning("fps: video has %.4g frames per second and the result %d, so that it is %s", rate, chosen, speed)
    return chosen


def oriented(image: np.ndarray | None, height: int, width: int) -> tuple[int, int]:
    """Height and width, exchanged if one of frame and image `[H, W, 3]` is upright and the other is not."""
    if image is None or (image.shape[0] > image.shape[1]) == (height > width):
        return height, width
    return width, height


def check_sizes(request: ResolvedRequest, geometry: LatentGeometry) -> None:
    """Refuse frames, and numbers of them, that are not whole tokens and latents, at full and at half size."""
    for name in ("height", "width"):
        _check_steps(name, getattr(request, name), geometry.pixels_per_token, 0)
    for name in ("num_frames", "base_num_frames", "overlap_history"):
        _check_steps(name, getattr(request, name), geometry.frames_per_latent, 1)
    _check_half_size(request, geometry)


def _check_second_scale(request: ResolvedRequest, settings: VideoSettings) -> None:
    if request.guidance_scale_2 is None:
        return
    if settings.boundary_ratio is None:
        raise InvalidParameterError("guidance_scale_2: this model has one transformer; give guidance_scale alone")
    if request.guidance_scale_2 > 1 >= request.guidance_scale:
        raise InvalidParameterError(
            f"guidance_scale_2: expected at most 1 where guidance_scale is {request.guidance_scale:g}, which "
            f"means no guidance, got {request.guidance_scale_2:g}"
        )


def _check_half_size(request: ResolvedRequest, geometry: LatentGeometry) -> None:
    if not (count := request.half_size_steps):
        return
    steps, token = request.num_inference_steps, geometry.pixels_per_token
    if count >= steps:
        raise InvalidParameterError(
            f"half_size_steps: expected fewer than the {steps} steps (num_inference_steps), the last of which are at "
            f"full size, got {count}"
        )
    if min(request.height, request.width) < 2 * token:
        raise InvalidParameterError(
            f"half_size_steps: expected 0 for frames of {request.height} x {request.width}, whose sides are less than "
            f"{2 * token} pixels"
        )
    if request.ar_step:
        raise InvalidParameterError("ar_step: expected 0 with half_size_steps, where all frames are at one step")


def _check_steps(name: str, value: int, step: int, offset: int) -> None:
    """Raise unless `value` is `step n + offset`, and above 0."""
    lower = (value - offset) // step * step + offset
    if value == lower and value > 0:
        return
    expected = f"a multiple of {step}" if offset == 0 else f"{step}n + {offset}"
    nearest = [near for near in (lower, lower + step) if near > 0] or [offset or step]
    raise InvalidParameterError(f"{name}: expected {expected}, got {value}; nearest {' or '.join(map(str, nearest))}")


def _check_conditioning(request: ResolvedRequest, model: VideoModel) -> None:
    """Refuse options that the kind of model does not have, and the lack of those that it needs."""
    conditioning, settings = model.conditioning, model.settings
    if not conditioning.forcing:
        _check_no_forcing(request, model)
    if request.image is None:
        if conditioning.encode is not None and settings.needs_image and not conditioning.control_layers:
            raise InvalidParameterError("image: this model is for image to video, and needs the first frame")
    elif conditioning.control_layers:
        raise InvalidParameterError(
            "image: a VACE model takes pictures as reference_images, or as frames of video that mask keeps"
        )
    elif not conditioning.takes_image:
        raise InvalidParameterError("image: this model is for text alone; use one for image to video or forcing")
    elif conditioning.given_frames and request.num_frames == 1:
        raise InvalidParameterError("num_frames: expected more than the one frame that the image is")
    _check_last_image(request, model)
    if not request.controls:
        return
    if request.video is not None and len(request.video) < request.num_frames:
        raise InvalidParameterError(
            f"video: has {len(request.video)} frames, fewer than num_frames, {request.num_frames}"
        )
    count, most = len(request.reference_images), model.geometry.latents(request.num_frames)
    if count > most:
        raise InvalidParameterError(
            f"reference_images: expected at most {most}, the latent frames of {request.num_frames} frames, got {count}"
        )


def _check_last_image(request: ResolvedRequest, model: VideoModel) -> None:
    conditioning = model.conditioning
    if request.last_image is None:
        if conditioning.needs_last_image and request.image is not None:
            raise InvalidParameterError("last_image: this model needs the last frame in addition to the first")
    elif not conditioning.takes_last_image:
        raise InvalidParameterError(
            "last_image: needs a model for first and last frame (Wan2.1-FLF2V, Wan2.2-I2V-A14B) or diffusion forcing "
            f"(SkyReels-V2-DF); {_this_is(model)}"
        )
    elif conditioning.encode is not None and request.image is None:
        raise InvalidParameterError("last_image: needs image too, the first frame, from which the clip goes to it")
    elif conditioning.encode is not None and request.num_frames == 1:
        raise InvalidParameterError("num_frames: expected more than one, for a first and a last frame")


def _check_no_forcing(request: ResolvedRequest, model: VideoModel) -> None:
    only = f"needs a model for diffusion forcing (such as SkyReels-V2-DF); {_this_is(model)}"
    used = {
        "video": request.video is not None and not request.controls,
        "ar_step": request.ar_step > 0,
        "causal_block_size": request.causal_block_size > 1,
        "addnoise_condition": request.addnoise_condition > 0,
    }
    for name, is_used in used.items():
        if is_used:
            raise InvalidParameterError(f"{name}: {only}")
    if request.num_frames > request.base_num_frames:
        raise InvalidParameterError(f"num_frames: longer than base_num_frames, {request.base_num_frames}, {only}")


def _check_images(request: ResolvedRequest) -> None:
    H, W = request.height, request.width
    first = None if request.video is None else request.video[0]
    references = [("reference_images", picture) for picture in request.reference_images]
    for name, picture in (("image", request.image), ("last_image", request.last_image), ("video", first), *references):
        if picture is None:
            continue
        h, w = picture.shape[:2]
        if max(h, w) > MOST_ASPECT * min(h, w) or min(w * H // W, h * W // H) < 1:
            raise InvalidParameterError(
                f"{name}: {h} x {w} pixels (height x width) have no part of the shape of a frame of {H} x {W}; give a "
                "picture of a shape that is closer to it"
            )
    if request.video is None or request.controls:
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


def _check_texts(request: ResolvedRequest, model: VideoModel) -> None:
    width, lengths = model.geometry.text_width, []
    if (request.prompt is None) == (request.prompt_embeds is None):
        raise InvalidParameterError("prompt: give it or prompt_embeds, one of the two")
    if request.negative_prompt_embeds is not None and request.negative_prompt != model.settings.negative_prompt:
        raise InvalidParameterError("negative_prompt: give it or negative_prompt_embeds, not both")
    if request.prompt is not None and not request.prompts:
        raise InvalidParameterError("prompt: expected a text, or one for each segment, got none")
    named = [*(("prompt", prompt) for prompt in request.prompts), ("negative_prompt", request.negative_prompt)]
    for name, text in named:
        if not isinstance(text, str):
            raise InvalidParameterError(f"{name}: expected a text, got {type(text).__name__}")
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        states = getattr(request, name)
        shape = tuple(getattr(states, "shape", ()))
        if states is not None and (len(shape) != 3 or shape[::2] != (1, width) or not shape[1]):
            raise InvalidParameterError(f"{name}: expected an array [1, tokens, {width}], got shape {shape}")
        lengths.append(model.settings.text_tokens if states is None else states.shape[1])
    if request.guided and lengths[0] != lengths[1]:
        raise InvalidParameterError(f"prompt_embeds: {lengths[0]} tokens, but the negative prompt has {lengths[1]}")


def _check_segments(request: ResolvedRequest, model: VideoModel) -> None:
    geometry, rules = model.geometry, model.rules
    sizes, block = request.segments(geometry), request.causal_block_size
    overlap = geometry.latents(request.overlap_history)
    if len(request.prompts) > len(sizes):
        _log.warning("prompt: %d for %d segments; the last are not used", len(request.prompts), len(sizes))
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
    if request.half_size_steps and rules.decode_whole_clip and len(sizes) > 1:
        raise InvalidParameterError(
            f"half_size_steps: expected 0 for a clip of several segments by the rules of {rules.name}, whose segments "
            "share latents of one size; take reference skyreels, or a larger base_num_frames"
        )
    if request.latents is None:
        return
    _, F, h, w, C = geometry.shape(sizes[0] + len(request.reference_images), request.height, request.width)
    if tuple(getattr(request.latents, "shape", ())) != (1, C, F, h, w):
        got = getattr(request.latents, "shape", type(request.latents).__name__)
        raise InvalidParameterError(f"latents: expected an array of shape {[1, C, F, h, w]}, got {got}")


def _check_resume(path: Any) -> None:
    """Refuse a path that cannot be a folder of segments."""
    # An empty name, such as of a variable of a shell that is not set, is the current folder as a path.
    if not isinstance(path, str | Path) or Path(path) == Path() or Path(path).is_file():
        raise InvalidParameterError(f"resume: expected a folder, which need not exist yet, got {str(path)!r}")
    check_parent(Path(path) / "segments" if Path(path).is_dir() else Path(path), "resume")
