"""Transformers of a pipeline, and the rule that chooses one of them for each iteration.

The published SkyReels-V2 and Wan2.1 models and Wan2.2's 5B have one transformer. Wan2.2's A14B has two, one for high
and one for low noise: a `TransformerSchedule` of two denoisers with the rule of `by_noise`. The denoising stage has one
`Span` for each of the two, the memory plan a row for each, and the run calls the spans one after the other on the same
state of the solver. Nothing else depends on the number of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from jaxtyping import Int, Int32

from verax.video.denoise import Denoiser
from verax.video.schedule import TRAIN_TIMESTEPS

__all__ = ["TransformerRule", "TransformerSchedule", "by_noise", "first_transformer"]

TransformerRule = Callable[[Int32[np.ndarray, "R *F"]], Int[np.ndarray, "R"]]
"""`rule(timesteps)`: index of the transformer of each iteration, from the timesteps of all frames or of each frame."""


def first_transformer(timesteps: Int32[np.ndarray, "R *F"]) -> Int[np.ndarray, "R"]:
    """Rule of pipelines with one transformer."""
    return np.zeros(len(timesteps), int)


def by_noise(boundary_ratio: float) -> TransformerRule:
    """Rule of two transformers: the first down to `boundary_ratio` of all noise, where 1 is noise alone.

    As in diffusers' `WanPipeline`, the iteration at the boundary is the first's. Of frames with a time each, the
    noisiest decides.
    """

    def rule(timesteps: Int32[np.ndarray, "R *F"]) -> Int[np.ndarray, "R"]:
        noisiest = timesteps.reshape(len(timesteps), -1).max(axis=1)
        return (noisiest < boundary_ratio * TRAIN_TIMESTEPS).astype(int)

    return rule


@dataclass(frozen=True)
class TransformerSchedule:
    """Transformers of a pipeline.

    Attributes:
        denoisers: transformers with their programs.
        rule: choice of one of them for each iteration.
    """

    denoisers: tuple[Denoiser, ...]
    rule: TransformerRule = first_transformer

    def spans(self, timesteps: Int32[np.ndarray, "R *F"]) -> list[tuple[int, int, int]]:
        """Runs of iterations with one transformer: its index, the first iteration, and the one after the last."""
        found, begin = [], 0
        for index, same in groupby(self.rule(timesteps).tolist()):
            end = begin + len(list(same))
            found.append((index, begin, end))
            begin = end
        return found
