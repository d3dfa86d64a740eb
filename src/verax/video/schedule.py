"""Schedule of a denoising run: noise levels, and the steps of each frame under diffusion forcing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from verax.errors import InvalidParameterError

__all__ = ["SIGMA_SCHEDULES", "TRAIN_TIMESTEPS", "ForcingSchedule", "NoiseLevels", "forcing_schedule", "noise_levels"]

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


_NOT_STARTED = 999
"""Timestep of frames that are noise and whose first step is still to come."""


class ForcingSchedule(NamedTuple):
    """Steps of `F` latent frames in `R` iterations.

    Attributes:
        timesteps: timestep of each frame.
        row: row of the solver's table, where `update` is set.
        update: True for frames that take a step.
    """

    timesteps: Int32[np.ndarray, "R F"]
    row: Int32[np.ndarray, "R F"]
    update: Bool[np.ndarray, "R F"]


def forcing_schedule(
    frames: int,
    timesteps: Int32[np.ndarray, "N"],
    *,
    ar_step: int = 0,
    causal_block_size: int = 1,
    prefix: int = 0,
    keep_partial_blocks: bool = True,
) -> ForcingSchedule:
    """Iterations of a segment.

    Args:
        frames: latent frames, a multiple of `causal_block_size`.
        timesteps: timestep of each of N steps.
        ar_step: steps by which a block is behind the one before it; 0 for all together.
        causal_block_size: latent frames in a block.
        prefix: latent frames at the beginning that are not denoised.
        keep_partial_blocks: True to leave all of them as they are. False, as in diffusers, to leave only those that
            fill whole blocks: the others are taken for noise.

    Raises:
        InvalidParameterError: if a size is out of range, or the frames cannot be cut into blocks.
    """
    if isinstance(ar_step, bool) or not isinstance(ar_step, int) or ar_step < 0:
        raise InvalidParameterError(f"ar_step: expected a whole number of at least 0, got {ar_step!r}")
    if isinstance(causal_block_size, bool) or not isinstance(causal_block_size, int) or causal_block_size < 1:
        raise InvalidParameterError(
            f"causal_block_size: expected a whole number of at least 1, got {causal_block_size!r}"
        )
    if frames % causal_block_size:
        raise InvalidParameterError(
            f"causal_block_size: {frames} latent frames in a window cannot be cut into blocks of {causal_block_size}"
        )
    N = len(timesteps)
    blocks, done = frames // causal_block_size, prefix // causal_block_size
    # A block's count is the number of its last step, 0 before the first; N + 1 says that it was done before.
    timestep_of = np.concatenate([[_NOT_STARTED], timesteps, [0]]).astype(np.int32)
    counts = np.zeros(blocks, np.int32)
    counts[:done] = N + 1
    iterations, updates = [], []
    while (counts < N).any():
        after = np.empty_like(counts)
        for i in range(blocks):
            goes_alone = i == 0 or counts[i - 1] >= N
            after[i] = np.clip(counts[i] + 1 if goes_alone else after[i - 1] - ar_step, 0, N + 1)
        iterations.append(after)
        updates.append((after != counts) & (after <= N))
        counts = after
    matrix = np.repeat(np.array(iterations, np.int32).reshape(-1, blocks), causal_block_size, axis=1)
    update = np.repeat(np.array(updates, bool).reshape(-1, blocks), causal_block_size, axis=1)
    if keep_partial_blocks:
        matrix[:, :prefix], update[:, :prefix] = N + 1, False
    return ForcingSchedule(timestep_of[matrix], np.clip(matrix - 1, 0, N - 1), update)
