"""Output of a run, and its progress: bars on a terminal, seconds of each stage, and the user's callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float32, UInt8

from verax import progress
from verax.errors import InvalidParameterError
from verax.video import files

SHEET_COLUMNS = 4


@dataclass(frozen=True)
class VideoProgress:
    """Progress of a run.

    Attributes:
        stage: "text", "image", "encode", "denoise" or "decode".
        done: steps of the stage that are done, of `total`.
        total: steps of the stage.
        segment: segment, counted from 0.
        segments: number of segments.
        seconds: seconds since the stage began.
        fps: frames per second of the clip.
        latents: latents of the segment, float32 `[1, 16, F, h, w]` as diffusers has them, at the step's size; while
            denoising.
        preview: function that makes a picture uint8 `[H, W, 3]` of the middle frame of the clean clip that the step
            predicts, at the step's size or with a longer side of 256 pixels; while denoising. It decodes by the tiny
            decoder if the pipeline has one, and else finds colours by a linear map that is fitted at the first call.
        frames: frames of the segment without those that it shares with the segment before, uint8
            `[T, height, width, 3]`; once it is decoded. With `reference="diffusers"` they are a preview: the segments
            of the clip are decoded together after the last, and the first frames of a segment that is decoded by itself
            differ a little.
    """

    stage: str
    done: int
    total: int
    segment: int
    segments: int
    seconds: float
    fps: int
    latents: np.ndarray | None = None
    frames: np.ndarray | None = None
    preview: Callable[[], UInt8[np.ndarray, "H W 3"]] | None = None


Callback = Callable[[VideoProgress], bool | None]
"""Function that is called after every step and stage. The run ends, with the finished segments, if it returns False."""


@dataclass(frozen=True)
class VideoOutput:
    """Clip that was made.

    Attributes:
        frames: uint8 `[T, height, width, 3]`; float32 from 0 to 1 for "np"; float32 `[1, 16, F, h, w]` for "latent".
        fps: frames per second.
        seed: seed of the noise.
        complete: False if the callback ended the run.
        steps: iterations of all segments.
        computed: iterations that ran the transformer's blocks.
        seconds: seconds of each stage.
    """

    frames: np.ndarray
    fps: int
    seed: int
    complete: bool = True
    steps: int = 0
    computed: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def save(self, path: str | Path, *, crf: int = files.CRF) -> Path:
        """Write the clip: .mp4, .gif, .webp, or a folder of png for a name without suffix; whole or not at all.

        Args:
            crf: constant rate factor of .mp4: 0 is lossless, 51 the worst.

        Raises:
            InvalidParameterError: if there is nothing to write, or for another suffix.
        """
        return files.write_clip(self._bytes(), path, fps=self.fps, crf=crf)

    def save_contact_sheet(self, path: str | Path, *, images: int = 8) -> Path:
        """Write some frames at even distances, the first and the last among them, in rows into one .png.

        Args:
            path: ends in .png.
            images: number of frames, at least 2.

        Raises:
            InvalidParameterError: if there is nothing to write, or the name has another suffix.
        """
        frames = self._bytes()
        chosen = np.unique(np.linspace(0, len(frames) - 1, max(images, 2)).round().astype(int))
        captions = [f"{i / self.fps:.2f} s" for i in chosen]
        return files.write_contact_sheet(frames[chosen], path, captions=captions, columns=SHEET_COLUMNS)

    def _bytes(self) -> UInt8[np.ndarray, "T H W 3"]:
        if self.frames.ndim != 4 or len(self.frames) == 0:
            raise InvalidParameterError("save: latents and empty clips cannot be written as images")
        return self.frames if self.frames.dtype == np.uint8 else np.round(self.frames * 255).astype(np.uint8)


LABELS = {
    "text": "encoding the prompt",
    "image": "encoding the image",
    "encode": "encoding the first frames",
    "denoise": "denoising",
    "decode": "decoding frames",
}

Step = Callable[..., None]
"""`step(done, latents=None, frames=None, clean=None)`: how much of a stage is done, with latents or frames for the
callback, and the prediction of the clean latents for its preview."""


class StopRunError(Exception):
    """The callback returned False."""


@dataclass(frozen=True)
class RunReporter:
    """Reporter that shows bars, adds up seconds and calls the user's callback.

    `picture`: function that makes a picture of one latent frame `[1, 1, h, w, C]`. `seconds`: seconds of each stage so
    far, all segments together.
    """

    callback: Callback | None
    fps: int
    segments: int
    show_progress: bool
    picture: Callable[[np.ndarray], np.ndarray]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def every_step(self) -> bool:
        """True if every iteration of the denoising loop is reported: to a callback, or by a bar. Otherwise all of a
        transformer's iterations run as one program call."""
        return self.callback is not None or (self.show_progress and progress.shown())

    @contextmanager
    def stage(self, name: str, total: int, segment: int, note: str = "") -> Iterator[Step]:
        """Time a stage of `total` steps, with a bar whose label ends in `note`; yield the function to call after each.

        Raises:
            StopRunError: out of the step after which the callback returns False.
        """
        begin = time.perf_counter()
        which = f" {segment + 1}/{self.segments}" if self.segments > 1 else ""
        reached = 0
        with progress.bar(LABELS[name] + which + note, enabled=self.show_progress) as report:

            def step(
                done: int,
                latents: Array | None = None,
                frames: np.ndarray | None = None,
                clean: Array | None = None,
            ) -> None:
                nonlocal reached
                reached = done
                seconds = time.perf_counter() - begin
                report(done, total, f"{seconds / done:.3g} s a step" if name == "denoise" else "")
                if self.callback is None:
                    return
                preview = None
                if clean is not None:  # its middle frame now: the next step takes the array
                    preview = partial(self.picture, np.asarray(clean[:, clean.shape[1] // 2][:, None]))
                now = VideoProgress(
                    stage=name,
                    done=done,
                    total=total,
                    segment=segment,
                    segments=self.segments,
                    seconds=seconds,
                    fps=self.fps,
                    latents=None if latents is None else channels_first(np.asarray(latents)),
                    frames=frames,
                    preview=preview,
                )
                if isinstance(answer := self.callback(now), bool | np.bool) and not answer:
                    raise StopRunError

            yield step
            if reached < total:
                step(total)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def channels_first(latents: Float32[np.ndarray, "1 F h w C"]) -> Float32[np.ndarray, "1 C F h w"]:
    """Latents in diffusers' layout."""
    return latents.transpose(0, 4, 1, 2, 3)
