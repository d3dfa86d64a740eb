"""Noise levels of a denoising run: the sigma schedules of the two published pipelines, shifted towards noise.

Flow matching mixes a clip x and noise n as `(1 - sigma) x + sigma n`. A schedule begins near 1 and ends at 0. The
timestep, which is an input of the model, is 1000 sigma, cut to a whole number. The two pipelines space sigma
differently before shifting it: the original (SkyReels-V2 and Wan2.1, `FlowUniPCMultistepScheduler`) evenly between
0.999 and 0, diffusers (`UniPCMultistepScheduler` with `use_flow_sigmas`, from 0.37) between 1 and 0.001.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from verax.errors import InvalidParameterError

__all__ = ["SIGMA_SCHEDULES", "TRAIN_TIMESTEPS", "NoiseLevels", "noise_levels"]

TRAIN_TIMESTEPS = 1000
"""Noise levels in training: the timestep of sigma 1."""

SIGMA_SCHEDULES: Mapping[str, tuple[float, float]] = MappingProxyType(
    # The original keeps its largest sigma in float32.
    {"skyreels": (float(np.float32(0.999)), 0.0), "diffusers": (1.0, 1 / TRAIN_TIMESTEPS)}
)
"""First and last sigma before shifting, by the name of the schedule."""

_BELOW_ONE = 1e-6
"""Distance that diffusers keeps between the first sigma and 1, where the signal is 0 and its logarithm infinite."""


class NoiseLevels(NamedTuple):
    """Noise levels of `N` steps, from sigma[0] to sigma[N] = 0, and the timestep of each."""

    sigmas: Float32[np.ndarray, "N_and_1"]
    timesteps: Int32[np.ndarray, "N"]


def noise_levels(steps: int, shift: float, schedule: str) -> NoiseLevels:
    """Noise levels of a run of `steps` steps.

    Args:
        steps: number of steps, at least 1.
        shift: 1 for even spacing; more spends more steps at high noise: sigma becomes `shift s / (1 + (shift - 1) s)`.
        schedule: one of `SIGMA_SCHEDULES`.

    Raises:
        InvalidParameterError: if an argument is out of range.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidParameterError(f"num_inference_steps: expected a whole number of at least 1, got {steps!r}")
    if not (shift > 0 and math.isfinite(shift)):
        raise InvalidParameterError(f"shift: expected a number above 0, got {shift}")
    if schedule not in SIGMA_SCHEDULES:
        raise InvalidParameterError(f"reference: expected one of {', '.join(SIGMA_SCHEDULES)}, got {schedule!r}")
    begin, end = SIGMA_SCHEDULES[schedule]
    even = np.linspace(begin, end, steps + 1)[:-1]
    sigmas = shift * even / (1 + (shift - 1) * even)
    if abs(sigmas[0] - 1) < _BELOW_ONE:
        sigmas[0] -= _BELOW_ONE
    timesteps = (sigmas * TRAIN_TIMESTEPS).astype(np.int32)
    return NoiseLevels(np.append(sigmas, 0).astype(np.float32), timesteps)
