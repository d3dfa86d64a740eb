"""Reading of images and clips, and their conversion to the sizes and ranges of models, as in either reference pipeline.

The two are SkyReels-V2's own (SkyworkAI/SkyReels-V2) and diffusers'. Images are uint8 `[H, W, 3]`, clips uint8
`[T, H, W, 3]`, both RGB. Writing is in `video.files`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Num, UInt8

from verax._optional import require_optional
from verax.errors import InvalidParameterError

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "Filter",
    "Image",
    "clip_pixels_diffusers",
    "clip_pixels_skyreels",
    "crop_to_aspect",
    "read_clip",
    "read_image",
    "resize",
    "to_signed",
    "to_uint8",
]

Filter = Literal["lanczos", "bicubic"]
"""Filter of Pillow by which an image is resized."""

Image = Any
"""A path, a PIL.Image, or an array `[H, W, 3]`: uint8, or floats in 0..1."""

CLIP_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
CLIP_STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
"""Mean and standard deviation of CLIP's training images, by channel, in 0..1."""

_ANIMATIONS = (".gif", ".webp")
"""Clips that Pillow reads; FFmpeg does not read animated WebP."""


def read_image(image: Image, *, name: str = "image") -> UInt8[np.ndarray, "H W 3"]:
    """Read an image as RGB, rotated upright if its file has an orientation. Transparency is dropped.

    Args:
        image: a path, a PIL.Image, or an array `[H, W, 3]`, uint8 or floats in 0..1.
        name: name of the argument in errors.

    Raises:
        InvalidParameterError: if there is no such file, it is no image, or the array is not one.
        MissingDependencyError: if Pillow is needed and not installed.
    """
    if hasattr(image, "__array__"):  # NumPy's and JAX's arrays, and not Pillow's images
        return _pixels(np.asarray(image), name, "[height, width, 3]")
    pil = require_optional("PIL.Image")
    upright = require_optional("PIL.ImageOps").exif_transpose
    if isinstance(image, pil.Image):
        return np.asarray(upright(image).convert("RGB"))
    if not isinstance(image, str | Path):
        raise InvalidParameterError(
            f"{name}: expected a path, a PIL.Image or an array [height, width, 3], got {type(image).__name__}"
        )
    try:
        with pil.open(image) as opened:
            return np.asarray(upright(opened).convert("RGB"))
    except FileNotFoundError as error:
        raise InvalidParameterError(f"{name}: there is no file {image}") from error
    except Exception as error:  # decoders of a dozen formats raise a dozen kinds
        raise InvalidParameterError(f"{name}: {image} cannot be read as an image: {error}") from error


def read_clip(clip: Any, *, name: str = "video") -> tuple[UInt8[np.ndarray, "T H W 3"], float | None]:
    """Read a clip: frames, and frames per second (None if unknown).

    Args:
        clip: a path to a video, an animated .gif or .webp, or a folder of images (in the order of their names); or a
            list of images, or an array `[T, H, W, 3]`, uint8 or floats in 0..1.
        name: name of the argument in errors.

    Raises:
        InvalidParameterError: if there is no such file, it is no clip or has no frames, or they differ in size.
        MissingDependencyError: if PyAV or Pillow is needed and not installed.
    """
    if isinstance(clip, str | Path):
        path = Path(clip)
        if not path.exists():
            raise InvalidParameterError(f"{name}: there is no file {path}")
        if not path.is_dir():
            frames, fps = _read_animation(path, name) if path.suffix.lower() in _ANIMATIONS else _read_video(path, name)
            return _stack(frames, name), fps
        clip = sorted(found for found in path.iterdir() if found.suffix.lower() in (".png", ".jpg", ".jpeg"))
    if isinstance(clip, Sequence):
        return _stack([read_image(frame, name=f"{name}: frame {i}") for i, frame in enumerate(clip)], name), None
    return _pixels(np.asarray(clip), name, "[frames, height, width, 3]"), None


def _read_video(path: Path, name: str) -> tuple[list[np.ndarray], float | None]:
    av = require_optional("av")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise InvalidParameterError(f"{name}: {path} has no images in it")
            stream = container.streams.video[0]
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
            return frames, float(stream.average_rate) if stream.average_rate else None
    except av.FFmpegError as error:
        raise InvalidParameterError(f"{name}: {path} cannot be read as a video: {error}") from error


def _read_animation(path: Path, name: str) -> tuple[list[np.ndarray], float | None]:
    pil, sequence = require_optional("PIL.Image"), require_optional("PIL.ImageSequence")
    frames, milliseconds = [], 0
    try:
        with pil.open(path) as opened:
            for frame in sequence.Iterator(opened):
                frames.append(np.asarray(frame.convert("RGB")))
                milliseconds += frame.info.get("duration", 0)
    except (OSError, ValueError) as error:
        raise InvalidParameterError(f"{name}: {path} cannot be read as a clip: {error}") from error
    return frames, 1000 * len(frames) / milliseconds if milliseconds else None


def _stack(frames: list[np.ndarray], name: str) -> UInt8[np.ndarray, "T H W 3"]:
    if not frames:
        raise InvalidParameterError(f"{name}: has no frames")
    if sizes := {frame.shape[:2] for frame in frames} - {frames[0].shape[:2]}:
        raise InvalidParameterError(f"{name}: frames differ in size: {frames[0].shape[:2]} and {sizes.pop()}")
    return np.stack(frames)


def _pixels(array: np.ndarray, name: str, layout: str) -> UInt8[np.ndarray, "*B H W 3"]:
    if array.ndim != layout.count(",") + 1 or array.shape[-1] != 3 or 0 in array.shape:
        raise InvalidParameterError(f"{name}: expected an array {layout}, got one of shape {list(array.shape)}")
    if array.dtype == np.uint8:
        return array
    # Not `<` and `>`, which NaN passes.
    if not np.issubdtype(array.dtype, np.floating) or not (array.min() >= 0 and array.max() <= 1):
        what = array.dtype if not np.issubdtype(array.dtype, np.floating) else f"{array.min():g} to {array.max():g}"
        raise InvalidParameterError(f"{name}: expected uint8, or floats in 0..1, got {what}")
    return (array.astype(np.float32) * 255).round().astype(np.uint8)


def crop_to_aspect(image: UInt8[np.ndarray, "H W 3"], height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Largest part about the middle that has the aspect of `height x width`; nothing is resized.

    SkyReels-V2's `resizecrop`, its rounding included.
    """
    h, w = image.shape[:2]
    if (h, w) == (height, width):
        return image
    size = (int(w * height / width), w) if h / w > height / width else (h, int(h * width / height))
    top, left = (round((whole - part) / 2) for whole, part in zip((h, w), size, strict=True))
    bottom, right = (round((whole + part) / 2) for whole, part in zip((h, w), size, strict=True))
    return image[top:bottom, left:right]


def resize(
    frames: UInt8[np.ndarray, "*B H W 3"],
    height: int,
    width: int,
    *,
    method: Filter = "lanczos",
) -> UInt8[np.ndarray, "*B height width 3"]:
    """Frames resized to a size, whatever their aspect, by Pillow's filters, which average when they shrink.

    Both references resize images by `lanczos`; SkyReels-V2's diffusion forcing by `bicubic`.

    Raises:
        MissingDependencyError: if Pillow is not installed.
    """
    if frames.shape[-3:-1] == (height, width):
        return frames
    pil = require_optional("PIL.Image")
    chosen = {"lanczos": pil.Resampling.LANCZOS, "bicubic": pil.Resampling.BICUBIC}[method]
    each = [
        np.asarray(pil.fromarray(f).resize((width, height), chosen)) for f in frames.reshape(-1, *frames.shape[-3:])
    ]
    return np.stack(each).reshape(*frames.shape[:-3], height, width, 3)


def to_signed(frames: UInt8[np.ndarray, "*B H W 3"]) -> Float[np.ndarray, "*B H W 3"]:
    """Pixels 0..255 as float32 in -1..1, the range of the video VAE."""
    return frames.astype(np.float32) / 255 * 2 - 1


def to_uint8(frames: Num[np.ndarray, "*B H W 3"]) -> UInt8[np.ndarray, "*B H W 3"]:
    """Floats in -1..1 as pixels 0..255, rounded to the nearest."""
    return ((np.asarray(frames, np.float32) / 2 + 0.5).clip(0, 1) * 255).round().astype(np.uint8)


def clip_pixels_skyreels(frame: Float[np.ndarray, "H W 3"], size: int = 224) -> Float[np.ndarray, "size size 3"]:
    """Input of CLIP in SkyReels-V2: the first frame of the clip, in -1..1, resized to a square whatever its aspect.

    By torch's bicubic `interpolate`, which does not average when it shrinks, then normalised.
    """
    rows, columns = (_bicubic(extent, size) for extent in frame.shape[:2])
    square = np.einsum("hH,wW,HWc->hwc", rows, columns, frame.astype(np.float64), optimize=True)
    return ((square * 0.5 + 0.5 - CLIP_MEAN) / CLIP_STD).astype(np.float32)


def clip_pixels_diffusers(image: UInt8[np.ndarray, "H W 3"], size: int = 224) -> Float[np.ndarray, "size size 3"]:
    """Input of CLIP in diffusers: the user's image, its shorter edge resized to `size`, cropped about the middle.

    Transformers' `CLIPImageProcessor`, by Pillow's bicubic filter.

    Raises:
        MissingDependencyError: if Pillow is not installed.
    """
    h, w = image.shape[:2]
    shape = (size, int(size * w / h)) if h <= w else (int(size * h / w), size)
    resized = resize(image, *shape, method="bicubic")
    top, left = (shape[0] - size) // 2, (shape[1] - size) // 2
    middle = resized[top : top + size, left : left + size].astype(np.float32) / 255
    return (middle - CLIP_MEAN) / CLIP_STD


def _bicubic(extent: int, size: int) -> Float[np.ndarray, "size extent"]:
    """The matrix of cubic convolution (Keys, 1981) along one axis, with torch's a = -0.75 and its repeated edges."""
    at = (np.arange(size) + 0.5) * extent / size - 0.5
    first = np.floor(at).astype(int) - 1
    matrix = np.zeros((size, extent))
    for tap in range(4):
        x = np.abs(at - (first + tap))
        near = (1.25 * x - 2.25) * x * x + 1
        far = -0.75 * (((x - 5) * x + 8) * x - 4)
        np.add.at(matrix, (np.arange(size), np.clip(first + tap, 0, extent - 1)), np.where(x <= 1, near, far))
    return matrix
