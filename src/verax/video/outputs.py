"""What a run gives, and what it tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from verax.errors import InvalidParameterError
from verax.video import files

__all__ = ["Callback", "VideoOutput", "VideoProgress"]

SHEET_COLUMNS = 4
"""Of a contact sheet: wide frames then fill a page."""


@dataclass(frozen=True)
class VideoProgress:
    """Where a run is."""

    stage: str
    """"text", "image", "encode", "denoise" or "decode"."""
    done: int
    total: int
    segment: int
    segments: int
    seconds: float
    """Since the stage began."""
    fps: int
    """Of the clip."""
    latents: np.ndarray | None = None
    """Of the segment, float32 `[1, 16, F, h, w]` as diffusers has them; while denoising."""
    frames: np.ndarray | None = None
    """Of the segment less those that it shares with the one before, uint8 `[T, height, width, 3]`; once it is decoded.

    With `reference="diffusers"` a preview: the segments of the clip are decoded together after the last, and the first
    frames of a segment that is decoded by itself differ a little."""


Callback = Callable[[VideoProgress], bool | None]
"""Told of every step and stage; the run ends early, with what is finished, if it returns False."""


@dataclass(frozen=True)
class VideoOutput:
    """A clip."""

    frames: np.ndarray
    """uint8 `[T, height, width, 3]`; float32 from 0 to 1 for "np"; float32 `[1, 16, F, h, w]` for "latent"."""
    fps: int
    seed: int
    complete: bool = True
    """False if the callback ended the run."""
    steps: int = 0
    """Iterations of all segments."""
    computed: int = 0
    """Those of them that ran the transformer's blocks."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each stage."""

    def save(self, path: str | Path, *, crf: int = files.CRF) -> Path:
        """Write the clip: .mp4, .gif, .webp, or a folder of png for a name without suffix; whole or not at all.

        Args:
            path: where to.
            crf: of .mp4: 0 loses nothing, 51 is worst.

        Raises:
            InvalidParameterError: if there is nothing to write, or the name's suffix is none of these.
        """
        return files.write_clip(self._bytes(), path, fps=self.fps, crf=crf)

    def save_contact_sheet(self, path: str | Path, *, images: int = 8) -> Path:
        """Write some frames at even distances, the first and the last among them, in rows into one .png.

        Args:
            path: ends in .png.
            images: how many, at least 2.

        Raises:
            InvalidParameterError: if there is nothing to write, or the name has another suffix.
        """
        frames = self._bytes()
        chosen = np.unique(np.linspace(0, len(frames) - 1, max(images, 2)).round().astype(int))
        captions = [f"{i / self.fps:.2f} s" for i in chosen]
        return files.write_contact_sheet(list(frames[chosen]), path, captions=captions, columns=SHEET_COLUMNS)

    def _bytes(self) -> UInt8[np.ndarray, "T H W 3"]:
        if self.frames.ndim != 4 or len(self.frames) == 0:
            raise InvalidParameterError("save: latents and empty clips cannot be written as images")
        return self.frames if self.frames.dtype == np.uint8 else np.round(self.frames * 255).astype(np.uint8)
