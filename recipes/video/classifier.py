"""Classifier of drawn clips, from the statistics of their pixels: it evaluates the built-in video model.

It assumes the rules by which `shapes` draws (one shape over a gradient from top to bottom) and has no prompt as input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

from recipes.video.shapes import COLOURS, DIRECTIONS, SHAPES, Scene, masks
from verax.errors import InvalidParameterError

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
