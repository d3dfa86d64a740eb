"""Evaluation of a video model of drawn clips, on scenes that are held out of training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from recipes.video.shapes import COLOURS, DIRECTIONS, SHAPES, Scene, draw, masks, scenes
from verax import progress
from verax.errors import InvalidParameterError

SEED = 7
"""Seed of the scenes, whose combinations of words are held out of training."""

CLIPS, DECODED = {"text": 150, "image": 48}, 16
"""Clips from text alone, clips from a drawn clip's caption and first frame, and drawn clips that the VAE encodes and
decodes."""


def psnr(one: UInt8[np.ndarray, "*B"], other: UInt8[np.ndarray, "*B"]) -> float:
    """Peak signal-to-noise ratio of 8-bit colours, dB."""
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return float(10 * np.log10(255.0**2 / max(error, 1e-12)))


def evaluate(folder: str | Path) -> dict[str, float]:
    """Generate clips with the folder's defaults from held-out prompts, and classify them.

    `folder`: folder of a video model trained by `recipe`.

    Returns:
        Share of the clips in which each word of the caption is recognised, and all words together (`text_all`,
        `image_all`); means of PSNR, dB; median time of a clip after the first, seconds.
    """
    from verax.video.pipeline import VideoPipeline

    pipe = VideoPipeline.from_pretrained(folder, show_progress=False)
    found: dict[str, float] = {}
    seconds: list[float] = []
    first: list[float] = []
    with progress.bar("clips") as report:
        for name, count in CLIPS.items():
            right: list[dict[str, bool]] = []
            for scene in scenes(SEED, 0, count, split="held_out"):
                picture = draw([scene], frames=1)[0, 0] if name == "image" else None
                begin = time.perf_counter()
                frames = pipe(scene.caption, image=picture, seed=len(seconds)).frames
                seconds.append(time.perf_counter() - begin)
                right.append(classify(frames).agrees(scene))
                if picture is not None:
                    first.append(psnr(frames[0], picture))
                report(len(seconds), sum(CLIPS.values()), "")
            found |= {f"{name}_{word}": float(np.mean([one[word] for one in right])) for word in right[0]}
            found[f"{name}_all"] = float(np.mean([all(one.values()) for one in right]))
    drawn = draw(scenes(SEED, 0, DECODED, split="held_out"))
    latents = [pipe.stages.encode(clip[None]) for clip in drawn]
    back = [np.asarray(pipe.stages.finish(pipe.stages.decode_call(z)(z))) for z in latents]
    found["first_frame_psnr"] = float(np.mean(first))
    found["seconds_per_clip"] = float(np.median(seconds[1:]))
    found["vae_psnr"] = float(np.mean([psnr(a, b) for a, b in zip(drawn, back, strict=True)]))
    return found


def contact_sheet(
    folder: str | Path, drawn: list[Scene], *, columns: int = 5, pictures: bool = False
) -> UInt8[np.ndarray, "H W 3"]:
    """Contact sheet: for each scene's caption, a row of evenly spaced frames of a generated clip.

    Args:
        folder: folder of the model.
        drawn: scenes, of which only the captions are used, and the first frames if `pictures`.
        columns: frames of a row.
        pictures: give the model the first frames.
    """
    from verax.video.pipeline import VideoPipeline

    pipe = VideoPipeline.from_pretrained(folder, show_progress=False)
    rows = []
    for seed, scene in enumerate(drawn):
        picture = draw([scene], frames=1)[0, 0] if pictures else None
        frames = pipe(scene.caption, image=picture, seed=seed).frames
        shown = frames[np.linspace(0, len(frames) - 1, columns).round().astype(int)]
        rows.append(np.concatenate(np.pad(shown, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=255), axis=1))
    return np.concatenate(rows)


# Classifier of drawn clips, from the statistics of their pixels. It assumes the rules by which `shapes` draws (one
# shape over a gradient from top to bottom) and has no prompt as input.

LEAST_DIFFERENCE = 40.0
"""Least distance in RGB of a shape's pixel from the gradient underneath: far above noise, below `CONTRAST`."""

LEAST_TRAVEL = 0.08
"""Least way of a moving shape, as a part of the side that it moves along: half of the least that is drawn."""

_PALETTE = np.asarray(list(COLOURS.values()), np.float32)
_AREAS = np.asarray([np.pi, 1.72**2, 1.87, np.pi * (1 - 0.52**2)])
"""Area of each of `SHAPES` at radius 1."""


@dataclass(frozen=True)
class Seen:
    """Content of a clip, in the words of `shapes`."""

    shape: str
    colour: str
    direction: str
    top: str
    bottom: str

    def agrees(self, scene: Scene) -> dict[str, bool]:
        """True for each part, by name, that equals the scene's."""
        return {name: value == getattr(scene, name) for name, value in vars(self).items()}


def classify(clip: UInt8[np.ndarray, "T H W 3"]) -> Seen:
    """Classify a clip's shape, its colour, its direction and the gradient's ends.

    The result is always one of the words, and means nothing for a clip without a shape.

    Raises:
        InvalidParameterError: if `clip` is not a clip of at least two frames.
    """
    if clip.ndim != 4 or clip.shape[-1] != 3 or len(clip) < 2:
        raise InvalidParameterError(f"clip: expected frames [T, H, W, 3], two or more, got shape {clip.shape}")
    frames = clip.astype(np.float32)
    background = _background(frames)
    top, bottom = (_nearest(background[end]) for end in (0, -1))
    away = frames - background[:, None]
    difference = np.linalg.norm(away, axis=-1)
    core = difference > max(LEAST_DIFFERENCE, 0.6 * float(np.quantile(difference, 0.98)))
    if not core.any():
        return Seen(SHAPES[0], top, "still", top, bottom)
    colour = np.median(frames[core], axis=0)
    # How much of a pixel is the shape's: where its colour lies between the gradient's and the shape's.
    whole = colour - background
    covered = np.clip(np.einsum("thwc,hc->thw", away, whole) / np.maximum((whole * whole).sum(-1), 1)[:, None], 0, 1)
    covered = np.where(covered > 0.25, covered, 0)
    centres = _centres(covered)
    return Seen(_shape(covered, centres), _nearest(colour), _direction(centres, clip.shape[1:3]), top, bottom)


def _background(frames: np.ndarray) -> np.ndarray:
    """Colours `[H, 3]` of the rows: a shape hides less than half of a row, and a line through all rows is the rest."""
    rows = np.median(frames, axis=(0, 2))
    height = len(rows)
    design = np.stack([np.ones(height), (np.arange(height) + 0.5) / height], axis=1)
    line, *_ = np.linalg.lstsq(design, rows, rcond=None)
    return (design @ line).astype(np.float32)


def _nearest(colour: np.ndarray) -> str:
    return list(COLOURS)[int(np.argmin(np.linalg.norm(_PALETTE - colour, axis=-1)))]


def _centres(covered: np.ndarray) -> Float[np.ndarray, "T 2"]:
    """Centre of gravity (x, y) of each frame in pixels; of the whole clip where a frame shows nothing."""
    total = covered.sum(axis=(1, 2))
    x = covered.sum(axis=1) @ (np.arange(covered.shape[2]) + 0.5)
    y = covered.sum(axis=2) @ (np.arange(covered.shape[1]) + 0.5)
    seen = total > 1
    centres = np.stack([x, y], axis=-1) / np.maximum(total, 1)[:, None]
    return np.where(seen[:, None], centres, centres[seen].mean(axis=0) if seen.any() else 0.0)


def _direction(centres: np.ndarray, size: tuple[int, ...]) -> str:
    slopes = np.polyfit(np.linspace(-0.5, 0.5, len(centres)), centres, 1)[0] / np.asarray([size[1], size[0]])
    signs = tuple(int(np.sign(slope)) if abs(slope) > LEAST_TRAVEL else 0 for slope in slopes)
    return next(name for name, motion in DIRECTIONS.items() if motion == signs)


def _shape(covered: np.ndarray, centres: np.ndarray) -> str:
    """The shape whose drawing, of the same area at the same centre of gravity, overlaps best over the clip."""
    height, width = covered.shape[1:]
    area = float(np.median(covered.sum(axis=(1, 2))))
    radii = np.sqrt(max(area, 1.0) / _AREAS).astype(np.float32)
    repeated = np.broadcast_to(centres.astype(np.float32), (len(SHAPES), *centres.shape))
    drawn = masks(np.arange(len(SHAPES)), repeated, radii, height, width)
    # Moved so that its centre of gravity, not the point it is drawn around, is the clip's.
    aside = np.stack([_centres(one) for one in drawn]) - repeated
    drawn = masks(np.arange(len(SHAPES)), (repeated - aside).astype(np.float32), radii, height, width)
    overlap = np.minimum(drawn, covered).sum(axis=(1, 2, 3)) / np.maximum(drawn, covered).sum(axis=(1, 2, 3))
    return SHAPES[int(np.argmax(overlap))]
