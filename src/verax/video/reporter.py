"""Progress of a run: bars on a terminal, seconds of each stage, and the user's callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Array, Float32

from verax import progress
from verax.video.outputs import Callback, VideoProgress

__all__ = ["Reporter", "RunReporter", "Step", "StopRunError", "channels_first"]

LABELS = {
    "text": "encoding the prompt",
    "image": "encoding the image",
    "encode": "encoding the first frames",
    "denoise": "denoising",
    "decode": "decoding frames",
}
"""Labels of the bars, by stage."""

Step = Callable[..., None]
"""`step(done, latents=None, frames=None)`: how much of a stage is done, with latents or frames for the callback."""


class StopRunError(Exception):
    """The callback returned False."""


class Reporter(Protocol):
    """Receiver of a run's progress."""

    @property
    def every_step(self) -> bool:
        """True if every iteration of the denoising loop is to be reported; otherwise all run as one program call."""
        ...

    def stage(self, name: str, total: int, segment: int, note: str = "") -> AbstractContextManager[Step]:
        """Context of a stage of `total` steps; yields the function to call after each."""
        ...


@dataclass(frozen=True)
class RunReporter:
    """Reporter that shows bars, adds up seconds and calls the user's callback.

    Attributes:
        callback: user's callback, or None.
        fps: frames per second of the clip, for the callback.
        segments: number of segments.
        show_progress: True for bars, if stderr is a terminal.
        seconds: seconds of each stage so far, all segments together.
    """

    callback: Callback | None
    fps: int
    segments: int
    show_progress: bool
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def every_step(self) -> bool:
        """True if there is a callback or a bar to be seen."""
        return self.callback is not None or (self.show_progress and progress.shown())

    @contextmanager
    def stage(self, name: str, total: int, segment: int, note: str = "") -> Iterator[Step]:
        """Time a stage, with a bar whose label ends in `note`.

        Raises:
            StopRunError: out of the step after which the callback returns False.
        """
        begin = time.perf_counter()
        which = f" {segment + 1}/{self.segments}" if self.segments > 1 else ""
        reached = 0
        with progress.bar(LABELS[name] + which + note, enabled=self.show_progress) as report:

            def step(done: int, latents: Array | None = None, frames: np.ndarray | None = None) -> None:
                nonlocal reached
                reached = done
                seconds = time.perf_counter() - begin
                report(done, total, f"{seconds / done:.3g} s a step" if name == "denoise" else "")
                if self.callback is None:
                    return
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
                )
                if self.callback(now) is False:
                    raise StopRunError

            yield step
            if reached < total:
                step(total)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def channels_first(latents: Float32[np.ndarray, "1 F h w C"]) -> Float32[np.ndarray, "1 C F h w"]:
    """Latents in diffusers' layout."""
    return latents.transpose(0, 4, 1, 2, 3)
