"""Transformers of a pipeline, and the rule that chooses one of them for each iteration.

The published SkyReels-V2 and Wan2.1 models have one transformer. Wan2.2 has two, one for high and one for low noise.
Such a pipeline is a `TransformerSchedule` of two denoisers with a rule like

    def by_noise(timesteps):  # [R] or [R, F], 1000 is noise
        return (timesteps.reshape(len(timesteps), -1).max(axis=1) < 0.875 * 1000).astype(int)

The denoising stage then has one `Span` for each of the two, the memory plan a row for each, and the run calls the spans
one after the other on the same state of the solver. Nothing else depends on the number of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from jaxtyping import Int, Int32

from verax.video.denoise import Denoiser

__all__ = ["TransformerRule", "TransformerSchedule", "first_transformer"]

TransformerRule = Callable[[Int32[np.ndarray, "R *F"]], Int[np.ndarray, "R"]]
"""`rule(timesteps)`: index of the transformer of each iteration, from the timesteps of all frames or of each frame."""


def first_transformer(timesteps: Int32[np.ndarray, "R *F"]) -> Int[np.ndarray, "R"]:
    """Rule of pipelines with one transformer."""
    return np.zeros(len(timesteps), int)


@dataclass(frozen=True)
class TransformerSchedule:
    """Transformers of a pipeline.

    Attributes:
        denoisers: transformers with their programs.
        rule: choice of one of them for each iteration.
    """

    denoisers: tuple[Denoiser, ...]
    rule: TransformerRule = first_transformer

    def spans(self, timesteps: Int32[np.ndarray, "R *F"]) -> list[tuple[Denoiser, int, int]]:
        """Runs of iterations with the same transformer: denoiser, first iteration, and the one after the last."""
        found, begin = [], 0
        for index, same in groupby(self.rule(timesteps).tolist()):
            end = begin + len(list(same))
            found.append((self.denoisers[index], begin, end))
            begin = end
        return found
