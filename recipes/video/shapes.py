"""Drawn clips: a shape of one colour floats over a gradient of two others.

They are the training data of the built-in video model. A clip depends on its scene only; a scene depends on the seed,
the split and its number only.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int, UInt8

Split = Literal["train", "held_out"]

SHAPES = ("circle", "square", "triangle", "ring")

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "yellow": (245, 220, 60),
    "green": (40, 160, 60),
    "cyan": (70, 210, 225),
    "blue": (45, 70, 215),
    "purple": (150, 50, 190),
    "white": (245, 245, 245),
    "black": (20, 20, 25),
}

DIRECTIONS: dict[str, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "up and left": (-1, -1),
    "up and right": (1, -1),
    "down and left": (-1, 1),
    "down and right": (1, 1),
    "still": (0, 0),
}
"""Signs of the motion (to the right, downwards) for each direction."""

TEMPLATES = (
    "a {colour} {shape} floats {direction} over a {top} to {bottom} gradient",
    "a {colour} {shape} drifts {direction} across a background from {top} to {bottom}",
    "over a gradient of {top} to {bottom}, a {colour} {shape} moves {direction}",
    "{colour} {shape} moving {direction}, {top} to {bottom} background",
)

RADIUS = (0.17, 0.22)
"""Least and largest radius of a shape, as a part of the shorter side."""

TRAVEL = (0.16, 0.28)
"""Least and largest way of a moving shape along an axis, from first to last frame, as a part of that side."""

SOFTNESS = 3.0
"""Width of a shape's soft edge, in pixels."""

CONTRAST = 85.0
"""Least distance in RGB of a shape's colour from every colour of the gradient, and of the gradient's two ends."""

HELD_OUT = 0.1
"""Share of the combinations of shape, colour, direction and gradient that is held out of training."""


@dataclass(frozen=True)
class Scene:
    """Content of a clip. Lengths are parts of the clip's size: x of its width, y of its height.

    The gradient runs from `top` to `bottom`; the centre of the shape goes from `start` to `end`, each (x, y), evenly.
    """

    shape: str
    colour: str
    direction: str
    top: str
    bottom: str
    radius: float
    start: tuple[float, float]
    end: tuple[float, float]
    template: int = 0

    @property
    def combination(self) -> str:
        """Words of the prompt: shape, colour, direction and gradient."""
        return f"{self.shape}/{self.colour}/{self.direction}/{self.top}/{self.bottom}"

    @property
    def split(self) -> Split:
        """Split of the combination, from a checksum of it, which is the same on every machine."""
        return "held_out" if zlib.crc32(self.combination.encode()) < HELD_OUT * 2**32 else "train"

    @property
    def caption(self) -> str:
        """Prompt, in the phrasing that the scene drew."""
        words = {"colour": self.colour, "shape": self.shape, "top": self.top, "bottom": self.bottom}
        if self.direction != "still":
            return TEMPLATES[self.template].format(direction=self.direction, **words)
        text = TEMPLATES[self.template].replace("moving {direction}", "standing still")
        for verb in ("floats", "drifts", "moves"):
            text = text.replace(verb + " {direction}", "stands still")
        return text.format(**words)


def scenes(seed: int, start: int, count: int, *, split: Split = "train") -> list[Scene]:
    """Scenes `start` to `start + count - 1` of a seed; each depends on its own number only."""
    return [scene(seed, number, split=split) for number in range(start, start + count)]


def scene(seed: int, number: int, *, split: Split = "train") -> Scene:
    """Random scene of the split."""
    rng = np.random.default_rng((seed, number, split == "held_out"))
    colours = list(COLOURS)
    while True:
        colour, top, bottom = (colours[i] for i in rng.choice(len(colours), 3, replace=False))
        direction = list(DIRECTIONS)[rng.integers(len(DIRECTIONS))]
        radius = rng.uniform(*RADIUS)
        ways = [sign * rng.uniform(*TRAVEL) for sign in DIRECTIONS[direction]]
        # Between the borders, with a margin of half a pixel of a 64-pixel side.
        margin = radius + 1 / 128
        starts = [rng.uniform(margin + max(-way, 0), 1 - margin - max(way, 0)) for way in ways]
        ends = [start + way for start, way in zip(starts, ways, strict=True)]
        drawn = Scene(
            shape=SHAPES[rng.integers(len(SHAPES))],
            colour=colour,
            direction=direction,
            top=top,
            bottom=bottom,
            radius=radius,
            start=(starts[0], starts[1]),
            end=(ends[0], ends[1]),
            template=int(rng.integers(len(TEMPLATES))),
        )
        if drawn.split == split and _contrast(colour, top, bottom) >= CONTRAST:
            return drawn


def _contrast(colour: str, top: str, bottom: str) -> float:
    shape, first, last = (np.asarray(COLOURS[name], np.float64) for name in (colour, top, bottom))
    along = last - first
    nearest = first + along * np.clip((shape - first) @ along / (along @ along), 0, 1)
    return float(min(np.linalg.norm(shape - nearest), np.linalg.norm(along)))


def draw(
    drawn: Sequence[Scene], *, frames: int = 17, height: int = 64, width: int = 64
) -> UInt8[np.ndarray, "B T H W 3"]:
    """Clips of the scenes, with soft edges."""
    first, last, colour = (
        np.asarray([COLOURS[getattr(s, name)] for s in drawn], np.float32) for name in ("top", "bottom", "colour")
    )
    down = ((np.arange(height, dtype=np.float32) + 0.5) / height)[:, None]
    rows = first[:, None] * (1 - down) + last[:, None] * down  # [B, H, 3]
    background = rows[:, None, :, None]
    when = np.linspace(0, 1, frames, dtype=np.float32)[:, None] if frames > 1 else np.zeros((1, 1), np.float32)
    start, end = (np.asarray([getattr(s, name) for s in drawn], np.float32) for name in ("start", "end"))
    centres = (start[:, None] * (1 - when) + end[:, None] * when) * np.asarray([width, height], np.float32)
    radii = np.asarray([s.radius for s in drawn], np.float32) * min(height, width)
    numbers = np.asarray([SHAPES.index(s.shape) for s in drawn])
    inside = masks(numbers, centres, radii, height, width)[..., None]
    return np.round(background + inside * (colour[:, None, None, None] - background)).astype(np.uint8)


def masks(
    shapes: Int[np.ndarray, "B"],
    centres: Float32[np.ndarray, "B T 2"],
    radii: Float32[np.ndarray, "B"],
    height: int,
    width: int,
) -> Float32[np.ndarray, "B T H W"]:
    """Coverage of each pixel by a shape: 0 to 1.

    Args:
        shapes: indices in `SHAPES`.
        centres: centres (x, y) in pixels, from the upper left corner of the picture.
        radii: radii in pixels.
        height: height of the picture in pixels.
        width: width of the picture in pixels.
    """
    x = np.arange(width, dtype=np.float32) + 0.5 - centres[..., 0][..., None]
    y = np.arange(height, dtype=np.float32) + 0.5 - centres[..., 1][..., None]
    covered = np.empty((*centres.shape[:2], height, width), np.float32)
    for number, name in enumerate(SHAPES):
        chosen = shapes == number
        if chosen.any():
            beyond = _DISTANCES[name](x[chosen][..., None, :], y[chosen][..., :, None], radii[chosen, None, None, None])
            covered[chosen] = np.clip(0.5 - beyond / np.float32(SOFTNESS), 0, 1)
    return covered


def _circle(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    return np.sqrt(x * x + y * y) - radius


def _square(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x), np.abs(y)) - np.float32(0.86) * radius


def _triangle(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    # Equilateral and upright: one edge below, and two mirrored ones at the sides.
    side = np.float32(np.sqrt(3) / 2) * np.abs(x) - np.float32(0.5) * (y + radius)
    return np.maximum(y - np.float32(0.8) * radius, side)


def _ring(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    return np.abs(np.sqrt(x * x + y * y) - np.float32(0.76) * radius) - np.float32(0.24) * radius


_DISTANCES = {"circle": _circle, "square": _square, "triangle": _triangle, "ring": _ring}
"""Distance from a shape's edge in pixels, negative inside; at corners approximately, as the larger of two edges'."""
