"""Pictures as models take them: cropped, resized and normalised as in the published pipelines.

Images are uint8 `[H, W, 3]`, RGB. The pipelines are SkyReels-V2's own (SkyworkAI/SkyReels-V2), Wan's own
(Wan-Video/Wan2.1, Wan-Video/Wan2.2) and diffusers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, UInt8

from verax._optional import require_optional

Filter = Literal["lanczos", "bicubic"]
"""Filter of Pillow by which an image is resized."""

TOKEN_PIXELS = 16
"""Height and width of a token in pixels, in all of Wan's models but 5B."""

CLIP_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
CLIP_STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
"""Mean and standard deviation of CLIP's training images, by channel, in 0..1."""


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
    frames: UInt8[np.ndarray, "*B H W 3"], height: int, width: int, *, method: Filter = "lanczos"
) -> UInt8[np.ndarray, "*B height width 3"]:
    """Frames resized to a size, whatever their aspect, by Pillow's filters, which average when they shrink.

    Both references resize images by `lanczos`; SkyReels-V2's diffusion forcing by `bicubic`.
    """
    if frames.shape[-3:-1] == (height, width):
        return frames
    pil = require_optional("PIL.Image")
    chosen = {"lanczos": pil.Resampling.LANCZOS, "bicubic": pil.Resampling.BICUBIC}[method]
    resized = [
        np.asarray(pil.fromarray(f).resize((width, height), chosen)) for f in frames.reshape(-1, *frames.shape[-3:])
    ]
    return np.stack(resized).reshape(*frames.shape[:-3], height, width, 3)


def cover(
    image: UInt8[np.ndarray, "H W 3"], height: int, width: int, *, method: Filter = "lanczos"
) -> UInt8[np.ndarray, "height width 3"]:
    """Image resized by Pillow's filters until it covers the frame, and cropped about the middle.

    Wan2.2's 5B resizes its image by `lanczos`; Wan2.1's VACE resizes control clips and masks by `bicubic`.
    """
    h, w = image.shape[:2]
    scale = max(height / h, width / w)
    resized = resize(image, round(scale * h), round(scale * w), method=method)
    top, left = (resized.shape[0] - height) // 2, (resized.shape[1] - width) // 2
    return resized[top : top + height, left : left + width]


def interpolate(image: UInt8[np.ndarray, "H W 3"], height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
    """Image resized to a frame as in Wan's image to video, by torch's bicubic `interpolate`, which does not average.

    Wan's code gives the frame the image's shape, with sides cut to whole tokens. An image of another shape than that
    is cropped first.
    """
    h, w = image.shape[:2]
    # The frame's sides times the image's are equal, but for what is cut off of either side.
    has_its_shape = -TOKEN_PIXELS * w < height * w - width * h < TOKEN_PIXELS * h
    image = image if has_its_shape else crop_to_aspect(image, height, width)
    rows, columns = (_bicubic(extent, size) for extent, size in zip(image.shape, (height, width), strict=False))
    frame = np.einsum("hH,wW,HWc->hwc", rows, columns, image.astype(np.float64), optimize=True)
    return frame.round().clip(0, 255).astype(np.uint8)


def size_of_area(picture: tuple[int, int], usual: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a picture's shape and the usual area, cut to whole tokens: Wan's image to video."""
    area, aspect = usual[0] * usual[1], picture[0] / picture[1]
    sides = np.sqrt(area * aspect), np.sqrt(area / aspect)
    return max(int(sides[0] // TOKEN_PIXELS), 1) * TOKEN_PIXELS, max(int(sides[1] // TOKEN_PIXELS), 1) * TOKEN_PIXELS


def size_nearest_to_shape(picture: tuple[int, int], usual: tuple[int, int], *, token: int) -> tuple[int, int]:
    """Height and width in whole tokens of at most the usual area: Wan2.2's 5B, `best_output_size`.

    One side is cut to whole tokens, and the other is what the area leaves. Of the two sizes that this gives, it is the
    one nearest to the picture's shape.
    """
    area, aspect = usual[0] * usual[1], picture[1] / picture[0]
    width = (area * aspect) ** 0.5
    height = area / width

    def whole(side: float) -> int:
        return max(int(side // token), 1) * token

    def distance(size: tuple[int, int]) -> float:
        ratio = aspect / (size[1] / size[0])
        return max(ratio, 1 / ratio)

    by_width = whole(area / whole(width)), whole(width)
    by_height = whole(height), whole(area / whole(height))
    return by_width if distance(by_width) < distance(by_height) else by_height


def size_of_clip(clip: tuple[int, int], usual: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a control clip's shape in whole tokens, of at most its own and the usual area: Wan's VACE."""
    h, w = clip
    tokens = min(usual[0] * usual[1] // TOKEN_PIXELS**2, (h // TOKEN_PIXELS) * (w // TOKEN_PIXELS))
    height = max(round(np.sqrt(tokens * (h / w))), 1)
    return height * TOKEN_PIXELS, max(tokens // height, 1) * TOKEN_PIXELS


def fit_on_white(
    pictures: Sequence[np.ndarray], height: int, width: int, *, multiple: int = 1
) -> Float[np.ndarray, "R height width 3"]:
    """Reference pictures as VACE sees them: whole, in the middle of a white frame, in -1..1.

    By torch's bilinear `interpolate`, which does not average when it shrinks.

    `pictures`: uint8 `[H, W, 3]`, each of its own size. `multiple`: sides of the pictures are first cut to multiples of
    this by `resize`, as in diffusers.
    """
    frames = np.ones((len(pictures), height, width, 3), np.float32)
    for frame, picture in zip(frames, pictures, strict=True):
        h, w = (max(side // multiple, 1) * multiple for side in picture.shape[:2])
        picture = to_signed(resize(picture, h, w)).astype(np.float64)
        scale = min(height / h, width / w)
        h, w = int(h * scale), int(w * scale)
        rows, columns = (_bilinear(extent, size) for extent, size in zip(picture.shape, (h, w), strict=False))
        top, left = (height - h) // 2, (width - w) // 2
        fitted = np.einsum("hH,wW,HWc->hwc", rows, columns, picture, optimize=True)
        frame[top : top + h, left : left + w] = fitted
    return frames


def to_signed(frames: UInt8[np.ndarray, "*B H W 3"]) -> Float[np.ndarray, "*B H W 3"]:
    """Pixels 0..255 as float32 in -1..1, the range of the video VAE."""
    return frames.astype(np.float32) / 255 * 2 - 1


def clip_pixels_skyreels(frame: Float[np.ndarray, "H W 3"], size: int = 224) -> Float[np.ndarray, "size size 3"]:
    """Input of CLIP in SkyReels-V2 and Wan: a picture in -1..1, resized to a square whatever its aspect.

    The picture is the first frame of the clip in SkyReels-V2, and the user's in Wan. By torch's bicubic `interpolate`,
    which does not average when it shrinks, then normalised.
    """
    rows, columns = (_bicubic(extent, size) for extent in frame.shape[:2])
    square = np.einsum("hH,wW,HWc->hwc", rows, columns, frame.astype(np.float64), optimize=True)
    return ((square * 0.5 + 0.5 - CLIP_MEAN) / CLIP_STD).astype(np.float32)


def clip_pixels_diffusers(image: UInt8[np.ndarray, "H W 3"], size: int = 224) -> Float[np.ndarray, "size size 3"]:
    """Input of CLIP in diffusers: the user's image, its shorter edge resized to `size`, cropped about the middle.

    Transformers' `CLIPImageProcessor`, by Pillow's bicubic filter.
    """
    h, w = image.shape[:2]
    shape = (size, int(size * w / h)) if h <= w else (int(size * h / w), size)
    resized = resize(image, *shape, method="bicubic")
    top, left = (shape[0] - size) // 2, (shape[1] - size) // 2
    middle = resized[top : top + size, left : left + size].astype(np.float32) / 255
    return (middle - CLIP_MEAN) / CLIP_STD


def _bilinear(extent: int, size: int) -> Float[np.ndarray, "size extent"]:
    """The matrix of linear interpolation along one axis, with repeated edges."""
    at = np.clip((np.arange(size) + 0.5) * extent / size - 0.5, 0, extent - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(extent)))


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
