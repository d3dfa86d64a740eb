"""Reading of pictures and clips: images are uint8 `[H, W, 3]`, clips uint8 `[T, H, W, 3]`, both RGB."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from verax._optional import require_optional
from verax.errors import InvalidParameterError

__all__ = ["Image", "read_clip", "read_image"]

Image = Any
"""A path, a PIL.Image, or an array `[H, W, 3]`: uint8, or floats in 0..1."""

_ANIMATIONS = (".gif", ".webp")
"""Clips that Pillow reads; FFmpeg does not read animated WebP."""


def read_image(image: Image, *, name: str = "image") -> UInt8[np.ndarray, "H W 3"]:
    """Read an image as RGB, rotated upright if its file has an orientation. Transparency is dropped.

    Args:
        image: a path, a PIL.Image, or an array `[H, W, 3]`, uint8 or floats in 0..1.
        name: name of the argument in errors.

    Raises:
        InvalidParameterError: if the file does not exist or is not an image, or for another array.
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
        InvalidParameterError: if the file does not exist or is not a clip, if it has no frames, or they differ in size.
        MissingDependencyError: if PyAV or Pillow is needed and not installed.
    """
    if isinstance(clip, str | Path):
        path = Path(clip)
        if not path.exists():
            raise InvalidParameterError(f"{name}: there is no file {path}")
        if not path.is_dir():
            frames, fps = _read_animation(path, name) if path.suffix.lower() in _ANIMATIONS else _read_video(path, name)
            return _stack(frames, name), fps
        clip = sorted(file for file in path.iterdir() if file.suffix.lower() in (".png", ".jpg", ".jpeg"))
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
