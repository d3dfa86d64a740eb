"""Diffusion forcing: frames of one clip at different noise levels, the earlier ones ahead of the later.

As in SkyReels-V2 (2025), `generate_timestep_matrix`. Latent frames are grouped in blocks. Block 0 takes a step in every
iteration. Block i is `ar_step` steps behind block i - 1 until that is done, and then takes a step in every iteration.
With `ar_step` 0 all blocks take their steps together. Prefix frames (an image, the end of an earlier clip) count as
done from the start.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from verax.errors import InvalidParameterError

__all__ = ["ForcingSchedule", "forcing_schedule"]

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
