"""Reading of pictures and clips: images are uint8 `[H, W, 3]`, clips uint8 `[T, H, W, 3]`, both RGB."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from verax._optional import require_optional
from verax.errors import InvalidParameterError, VeraxError

Image = Any
"""A path, a PIL.Image, or an array `[H, W, 3]`: uint8, or floats in 0..1."""

_ANIMATIONS = (".gif", ".webp", ".apng", ".avif")
"""Clips that Pillow reads; FFmpeg reads no animated WebP, and one frame of an animated AVIF."""

BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262
"""Tags of TIFF files."""

WHITE_IS_ZERO = 0
"""Value of the tag `PHOTOMETRIC`, which Pillow applies to images of 8 bits only."""

_FRAMES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".tif", ".tiff")
"""Files of a folder that are frames of a clip. One of them is a clip too: .png may be animated, .tif have pages."""

_MOST_FRAMES = 10_000
"""Frames that an animation may have once each is repeated for as long as it is shown."""

_MOST_PIXELS = 1 << 30
"""Pixels of an animation, of which each frame may have a sixteenth. A damaged head of a small file says any number."""

RATE = "verax: {frames} frames, {fps:g} a second"
"""Comment that `files.write_clip` writes into an animation: files have durations only, and one frame for equal ones."""

_RATE = re.compile(rb"verax: ([0-9]+) frames, ([0-9.]+) a second")


def read_image(image: Image, *, name: str = "image") -> UInt8[np.ndarray, "H W 3"]:
    """Read an image as RGB, rotated upright if its file has an orientation. Transparency is dropped.

    Grey images of more than 8 bits are scaled to 8: whole numbers up to 65535, and floats up to 1.

    `image`: a path, a PIL.Image, or an array `[H, W, 3]`, uint8 or floats in 0..1.
    """
    if hasattr(image, "__array__"):  # NumPy's and JAX's arrays, and not Pillow's images
        return _pixels(as_array(image, name), name, "[height, width, 3]")
    pil = require_optional("PIL.Image")
    if isinstance(image, pil.Image):
        return _rgb(image, name)
    if not isinstance(image, str | Path):
        raise InvalidParameterError(
            f"{name}: expected a path, a PIL.Image or an array [height, width, 3], got {type(image).__name__}"
        )
    try:
        with pil.open(image) as opened:
            return _rgb(opened, name)
    except FileNotFoundError as error:
        raise InvalidParameterError(f"{name}: there is no file {image}") from error
    except InvalidParameterError:
        raise
    except Exception as error:
        raise InvalidParameterError(f"{name}: {image} cannot be read as an image: {error}") from error


def as_array(values: Any, name: str) -> np.ndarray:
    """NumPy's array of another library's, which may not allow it: PyTorch's of bfloat16, or with gradients."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidParameterError(f"{name}: cannot be read as an array: {error}; give float32") from error


def _rgb(image: Any, name: str) -> UInt8[np.ndarray, "H W 3"]:
    """Pixels of a PIL.Image, upright."""
    tags = getattr(image, "tag_v2", {})  # of a TIFF file
    image = require_optional("PIL.ImageOps").exif_transpose(image)
    if image.mode != "F" and not image.mode.startswith("I"):
        try:
            return np.asarray(image.convert("RGB"))
        except ValueError as error:
            raise InvalidParameterError(f"{name}: an image of mode {image.mode} is not read: {error}") from error
    # Pillow's own conversion cuts these at 255.
    bits = min(tags.get(BITS_PER_SAMPLE, (16,))[0], 16)
    values, white = np.asarray(image), 1 if image.mode == "F" else 2**bits - 1
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= white) or (image.mode == "I" and 0 < high <= 255):
        hint = "; convert an image of 8 bits to mode L" if 0 < high <= 255 else ""
        raise InvalidParameterError(
            f"{name}: expected grey of 0 to {white} in an image of mode {image.mode}, got {low:g} to {high:g}{hint}"
        )
    grey = np.round(values * (255 / white)).astype(np.uint8)
    return np.repeat((255 - grey if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else grey)[..., None], 3, axis=-1)


def read_clip(
    clip: Any, *, name: str = "video", limit: int | None = None
) -> tuple[UInt8[np.ndarray, "T H W 3"], float | None]:
    """Read a clip: frames, and frames per second (None if unknown).

    Frames of a video are turned as its file says. Frames of an animation are repeated for as long as they are shown.

    Args:
        clip: a path to a video, an image that may be animated (.gif, .webp, .png, .avif), or a folder of images, in
            the order of their names and of the numbers in them; or a list of images, or an array `[T, H, W, 3]`, uint8
            or floats in 0..1.
        name: name of the argument in errors.
        limit: number of frames to read, the first ones; all if None.

    Raises:
        InvalidParameterError: if the file does not exist or is not a clip, if it has no frames, or they differ in size.
        MissingDependencyError: if PyAV or Pillow is needed and not installed.
    """
    if isinstance(clip, str | Path):
        path = Path(clip)
        if not path.exists():
            raise InvalidParameterError(f"{name}: there is no file {path}")
        if not path.is_dir():
            read = _read_animation if path.suffix.lower() in (*_ANIMATIONS, *_FRAMES) else _read_video
            try:
                frames, fps = read(path, name, limit)
            except VeraxError:
                raise
            except Exception as error:  # decoders of a dozen formats raise a dozen kinds
                raise InvalidParameterError(f"{name}: {path} cannot be read as a clip: {error}") from error
            return _stack(frames[:limit], name), fps
        files = [file for file in path.iterdir() if file.suffix.lower() in _FRAMES and not file.name.startswith(".")]
        if not files:
            raise InvalidParameterError(
                f"{name}: {path} has no frames: expected files that end in {', '.join(_FRAMES)}"
            )
        clip = sorted(files, key=_natural_order)
    if isinstance(clip, Sequence):
        clip = clip[:limit]
        return _stack([read_image(frame, name=f"{name}: frame {i}") for i, frame in enumerate(clip)], name), None
    return _pixels(as_array(clip, name)[:limit], name, "[frames, height, width, 3]"), None


def _natural_order(file: Path) -> tuple[list[str | int], str]:
    """Key that sorts frame_2 before frame_10."""
    parts = re.split(r"([0-9]+)", file.name.lower())
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], file.name


def frame_pixels(frame: Any, stream: Any) -> UInt8[np.ndarray, "H W 3"]:
    """Pixels of a frame that PyAV decoded from a stream, as they are shown.

    Wide or narrow pixels are made square, and the frame is turned or mirrored as its display matrix says.
    """
    wide = stream.sample_aspect_ratio or 1
    pixels = frame.to_ndarray(format="rgb24", width=max(1, round(frame.width * wide)))
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return pixels
    # A pixel (x, y) is shown at (a x + c y, b x + d y), but for a shift.
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    if abs(b) > abs(a):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return np.ascontiguousarray(pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])


def _read_video(path: Path, name: str, limit: int | None) -> tuple[list[np.ndarray], float | None]:
    with require_optional("av").open(str(path.absolute())) as container:  # FFmpeg takes `take:` for a protocol
        stream = container.streams.best("video")  # not a cover picture, which may be the first
        if stream is None:
            raise InvalidParameterError(f"{name}: {path} has no images in it")
        shown = [(frame_pixels(frame, stream), frame.time) for frame in islice(container.decode(stream), limit)]
        rate = float(stream.average_rate) if stream.average_rate else None
    order, fps = even_order([time for _, time in shown], rate)
    return [shown[i][0] for i in order], fps


def even_order(times: Sequence[float | None], rate: float | None) -> tuple[list[int], float | None]:
    """Numbers of a video's frames at even times, and frames per second.

    Args:
        times: time of each frame, seconds.
        rate: frames per second that the file says.
    """
    known = [time for time in times if time is not None]
    if len(known) < max(2, len(times)) or known[-1] <= known[0]:
        return list(range(len(times))), rate
    # Phones write frames at uneven times. Each is shown from its time on: at even times, that is the newest one.
    fps = (len(known) - 1) / (known[-1] - known[0])
    ticks = known[0] + (np.arange(len(known)) + 0.25) / fps
    newest = np.searchsorted(known, ticks, side="right") - 1
    return newest.tolist(), rate if rate and abs(rate - fps) < 0.02 * fps else fps


def animation_frames(opened: Any) -> Iterable[Any]:
    """Frames of an open PIL.Image. Of a camera's JPEG with more pictures (depth, the other eye) the photo alone.

    Without the picture of an animated .png that only programs show which cannot animate it.
    """
    if opened.format == "MPO":
        return [opened]
    frames = require_optional("PIL.ImageSequence").Iterator(opened)
    return islice(frames, int(getattr(opened, "n_frames", 1) > 1 and opened.info.get("default_image", False)), None)


def _read_animation(path: Path, name: str, _: int | None) -> tuple[list[np.ndarray], float | None]:
    frames, durations = [], []
    with require_optional("PIL.Image").open(path) as opened:
        count, (width, height) = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1), opened.size
        if count > 1 and max(count, 16) * width * height > _MOST_PIXELS:
            raise InvalidParameterError(
                f"{name}: {path} has {count} frames of {width} x {height} pixels; expected at most "
                f"{_MOST_PIXELS // 16} pixels in each, and {_MOST_PIXELS} in all"
            )
        for frame in animation_frames(opened):
            frames.append(_rgb(frame, name))
            durations.append(frame.info.get("duration", 0))
        info = opened.info
    order, fps = animation_order(durations, info, name=f"{name}: {path}")
    return [frames[i] for i in order], fps


def animation_order(
    durations: Sequence[float], info: Mapping[str, Any], *, name: str, limit: int = _MOST_FRAMES
) -> tuple[list[int], float | None]:
    """Numbers of an animation's frames at even times, and frames per second (None if unknown).

    Equal frames are one in these files, shown for longer. A frame of the clip lasts as long as the shortest of them.

    Args:
        durations: time for which each frame is shown, milliseconds.
        info: Pillow's description of the file, with the comment of `files.write_clip`.
        name: name of the file in errors.
        limit: number of frames that the clip may have.

    Raises:
        InvalidParameterError: if it has more.
    """
    written = next(filter(None, (_RATE.fullmatch(info.get(key, b"")) for key in ("comment", "xmp"))), None)
    shown = [duration for duration in durations if duration > 0]
    if not shown and written is None:
        return list(range(len(durations))), None
    fps = 1000 / min(shown) if written is None else float(written[2])
    counts = [max(1, round(duration * fps / 1000)) for duration in durations]
    if written is not None:
        counts[-1] = max(1, int(written[1]) - sum(counts[:-1]))
    if sum(counts) > limit:
        raise InvalidParameterError(
            f"{name} has frames that are shown for different times, which are {sum(counts)} frames of the "
            f"shortest; expected at most {limit}"
        )
    order = [i for i, count in enumerate(counts) for _ in range(count)]
    return order, 1000 * sum(counts) / sum(durations) if written is None else fps


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
