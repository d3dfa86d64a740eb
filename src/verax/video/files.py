"""Files of clips and contact sheets, written whole or not at all: to a temporary name, then renamed."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from verax._optional import require_optional
from verax.errors import InvalidParameterError
from verax.files import atomic_path
from verax.video.images import RATE

_log = logging.getLogger("verax.video")

CRF = 18
"""x264's constant rate factor: 0 is lossless, 51 the worst; 18 is visually lossless."""

SUFFIXES = (".mp4", ".gif", ".webp", "")
"""Suffixes of clips; no suffix is a folder of .png."""

_MOST_SIDE = {".mp4": 16384, ".webp": 16383, ".gif": 65535}
"""Pixels in height and in width that a format takes."""

_SHOWN_LONGER = 10
"""Milliseconds up to which browsers show a frame of an animation for 100."""

_FRAME = re.compile(r"frame_\d{5,}\.png")
_BT709 = 1
"""Code of BT.709 in H.264's tables of color spaces, primaries and transfers: players assume it of HD video."""

_TEXT_SIZE = 12
"""Size in pixels of a contact sheet's captions, and of the margin around its images."""


def check_path(path: str | Path, *, fps: float | None = None, name: str = "path") -> Path:
    """Check that a clip can be written to a path, before any work; return the path."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidParameterError(
            f"{name}: {path.name} has suffix {path.suffix}; clips are written as .mp4, .gif, .webp, or, without a "
            "suffix, as a folder of .png"
        )
    check_parent(path, name)
    if path.suffix and path.is_dir():
        raise InvalidParameterError(f"{name}: {path} is a folder")
    if not path.suffix and path.exists():
        foreign = not path.is_dir() or any(not _FRAME.fullmatch(file.name) for file in path.iterdir())
        if foreign:
            raise InvalidParameterError(f"{name}: {path} exists, and holds other things than frames of a clip")
    fastest = 100 if path.suffix.lower() == ".gif" else 1000
    if fps is not None and not 0 < fps <= fastest:
        kind = path.suffix.lower() or "folder"
        raise InvalidParameterError(
            f"fps: expected more than 0 and at most {fastest} frames per second in a {kind}, got {fps}"
        )
    require_optional("av" if path.suffix.lower() == ".mp4" else "PIL.Image")
    return path


def clip_path(folder: Path, custom_id: str) -> Path:
    """File of a clip in a folder of many: named by its id where that is a plain word, else by a digest, which leads
    nowhere else."""
    plain = custom_id.replace("-", "").replace("_", "").isalnum() and custom_id.isascii() and len(custom_id) <= 128
    name = custom_id if plain else hashlib.sha256(custom_id.encode()).hexdigest()[:32]
    return folder / f"{name}.mp4"


def check_sheet_path(path: str | Path, *, name: str = "path") -> Path:
    """Check that a contact sheet can be written to a path; return the path."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise InvalidParameterError(f"{name}: a contact sheet is a .png, got {path.name}")
    check_parent(path, name)
    require_optional("PIL.Image")
    return path


def write_clip(frames: UInt8[np.ndarray, "T H W 3"], path: str | Path, *, fps: float, crf: int = CRF) -> Path:
    """Write a clip in the format of the path's suffix, in place of a file or folder that is there; return the path.

    Args:
        frames: RGB.
        path: ends in .mp4 (H.264, yuv420p), .gif, .webp (animated), or nothing: a folder of `frame_00000.png` on.
        fps: frames per second. Not written into a folder.
        crf: quality of .mp4: 0 (lossless) to 51.
    """
    path = check_path(path, fps=fps)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise InvalidParameterError(
            f"frames: expected uint8 [frames, height, width, 3], got {frames.dtype} {list(frames.shape)}"
        )
    suffix = path.suffix.lower()
    if suffix and max(frames.shape[1:3]) > (most := _MOST_SIDE[suffix]):
        raise InvalidParameterError(
            f"frames: {suffix} takes at most {most} pixels in height and width, got {frames.shape[1]} x "
            f"{frames.shape[2]}; a folder takes any"
        )
    if suffix == ".mp4":
        if not 0 <= crf <= 51:
            raise InvalidParameterError(f"crf: expected 0 (lossless) to 51, got {crf}")
        if frames.shape[1] % 2 or frames.shape[2] % 2:
            raise InvalidParameterError(
                f"frames: .mp4 takes even heights and widths, got {frames.shape[1]} x {frames.shape[2]}; "
                ".gif, .webp and folders take any"
            )
    with atomic_path(path) as partial:
        if suffix == ".mp4":
            _write_mp4(frames, partial, fps, crf)
        elif suffix:
            _write_animation(frames, partial, fps)
        else:
            partial.mkdir()
            for i, frame in enumerate(frames):
                require_optional("PIL.Image").fromarray(frame).save(partial / f"frame_{i:05}.png")
    return path


def write_contact_sheet(
    images: UInt8[np.ndarray, "N H W 3"], path: str | Path, *, captions: Sequence[str], columns: int
) -> Path:
    """Write images in rows of `columns` into one .png, each with its caption below; return the path.

    `captions`: one for each image, broken into lines as wide as an image.
    """
    path = check_sheet_path(path)
    pil, drawing = require_optional("PIL.Image"), require_optional("PIL.ImageDraw")
    font = require_optional("PIL.ImageFont").load_default(_TEXT_SIZE)
    height, width = images.shape[1:3]
    texts = [_wrapped(caption, width, font.getlength) for caption in captions]
    line = _TEXT_SIZE + 4
    below = line * max(map(len, texts))
    rows = -(-len(images) // columns)
    cell = (width + _TEXT_SIZE, height + below + _TEXT_SIZE)
    sheet = pil.new("RGB", (columns * cell[0] + _TEXT_SIZE, rows * cell[1] + _TEXT_SIZE), "white")
    pen = drawing.Draw(sheet)
    for i, (image, lines) in enumerate(zip(images, texts, strict=True)):
        left, top = i % columns * cell[0] + _TEXT_SIZE, i // columns * cell[1] + _TEXT_SIZE
        sheet.paste(pil.fromarray(image), (left, top))
        for number, text in enumerate(lines):
            pen.text((left, top + height + number * line + 2), text, fill="black", font=font)
    with atomic_path(path) as partial:
        sheet.save(partial)
    return path


def check_parent(path: Path, name: str) -> None:
    """Raise InvalidParameterError, which begins with `name`, if there is no folder that `path` can be written in."""
    if not path.parent.is_dir():
        raise InvalidParameterError(f"{name}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InvalidParameterError(f"{name}: the folder {path.parent.absolute()} cannot be written to")


def _write_mp4(frames: np.ndarray, path: Path, fps: float, crf: int) -> None:
    av = require_optional("av")
    # Whole, since FFmpeg takes what is before a colon in the name of a file for a protocol.
    with av.open(str(path.absolute()), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(crf)}
        context = stream.codec_context
        # x264's lookahead thread makes the bytes depend on timing.
        context.thread_count = 1
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        for frame in frames:
            image = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(image.reformat(format="yuv420p", dst_colorspace=_BT709)))
        container.mux(stream.encode())


def _write_animation(frames: np.ndarray, path: Path, fps: float) -> None:
    # Files count time in steps of 10 ms (GIF) and 1 ms: frames last one step more or less, so that the whole is right.
    step = 10 if path.suffix.lower() == ".gif" else 1
    ends = np.round(np.arange(len(frames) + 1) * 1000 / fps / step).astype(int) * step
    if np.diff(ends).min() <= _SHOWN_LONGER:
        _log.warning(
            "fps: browsers show frames of %d ms or less for 100 ms; a .gif of at most 50 frames a second has none, nor "
            "has a .webp of at most 90",
            _SHOWN_LONGER,
        )
    first, *rest = (require_optional("PIL.Image").fromarray(frame) for frame in frames)
    text = RATE.format(frames=len(frames), fps=fps).encode()
    comment = {"comment": text} if path.suffix.lower() == ".gif" else {"xmp": text}
    try:
        first.save(path, save_all=True, append_images=rest, duration=np.diff(ends).tolist(), loop=0, **comment)
    except (OverflowError, struct.error) as error:  # the second before Pillow 13
        raise InvalidParameterError(
            f"fps: {fps:g} frames per second show equal frames for longer than the 655 seconds that a .gif can"
        ) from error


def _wrapped(text: str, width: int, length: Callable[[str], float]) -> list[str]:
    """Lines of whole words, each at most `width` wide unless one word is wider."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and length(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
