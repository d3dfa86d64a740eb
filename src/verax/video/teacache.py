"""TeaCache: steps at which the transformer's blocks are skipped, chosen before the run.

Liu et al., "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model" (2024), with the coefficients that
its authors fitted to Wan2.1 and SkyReels-V2 uses. The distance between the embeddings of time of two steps is mapped by
a polynomial to an estimate of the distance between the blocks' outputs. The latents are not used, so that the choice
follows from the timesteps alone. A step that skips the blocks adds the residual that they added when they last ran.

SkyReels-V2's own code counts calls, two a step, against a number of steps, and so starts over half way through. Here,
as in the authors' code, the first and last steps are the first and last of the run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int32

from verax.errors import InvalidParameterError
from verax.models.video_model import TeaCache

__all__ = ["steps_running_blocks"]

Embedding = Callable[[Int32[np.ndarray, "R ..."]], tuple[Float[np.ndarray, "R ..."], Float[np.ndarray, "R ..."]]]
"""`(e, e0)` of each row of timesteps: the embedding of time, and its projection that modulates the blocks."""


def steps_running_blocks(
    timesteps: Int32[np.ndarray, "R ..."], embedding: Embedding, threshold: float, cache: TeaCache
) -> Bool[np.ndarray, "R"]:
    """True for the steps that run the blocks; the others reuse the last residual.

    Args:
        timesteps: timestep of each step, of all frames or (diffusion forcing) of each frame.
        embedding: embedding of time of the model.
        threshold: sum of estimated changes at which the blocks run again; 0.1 to 0.3 is usual.
        cache: measure of the family's `teacache`.

    Raises:
        InvalidParameterError: if `threshold` is not above 0.
    """
    if not threshold > 0:
        raise InvalidParameterError(f"cache_threshold: expected a number above 0, got {threshold}")
    R = len(timesteps)
    run_blocks = np.ones(R, bool)
    change = 0.0
    rows = embedding(timesteps)[cache.projected]
    for i in range(cache.first, R - cache.last):
        change += np.polyval(cache.polynomial, np.abs(rows[i] - rows[i - 1]).mean() / np.abs(rows[i - 1]).mean())
        run_blocks[i] = change >= threshold
        if run_blocks[i]:
            change = 0.0
    return run_blocks
