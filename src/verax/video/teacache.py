"""TeaCache: steps at which the transformer's blocks are skipped, chosen before the run.

Liu et al., "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model" (2024), with the coefficients that
its authors fitted to Wan2.1 and SkyReels-V2 uses. The distance between the embeddings of time of two steps is mapped by
a polynomial to an estimate of the distance between the blocks' outputs. The latents are not used, so that the choice
follows from the timesteps alone. A step that skips the blocks adds the residual that they added when they last ran.

SkyReels-V2's own code counts calls, two a step, against a number of steps, and so starts over half way through. Here,
as in the authors' code, the first and last steps are those of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int32

from verax.errors import InvalidParameterError

__all__ = ["TeaCache", "steps_running_blocks", "teacache_for"]

Embedding = Callable[[Int32[np.ndarray, "R ..."]], tuple[Float[np.ndarray, "R ..."], Float[np.ndarray, "R ..."]]]
"""`(e, e0)` of each row of timesteps: the embedding of time, and its projection that modulates the blocks."""

_SMALL = 2048
"""Width up to which a model counts as 1.3B (which is 1,536 wide; 14B is 5,120)."""


class TeaCache(NamedTuple):
    """Measure of the distance between steps, and the steps that are always computed.

    Attributes:
        polynomial: coefficients, the highest power first.
        projected: True to compare the projection `e0`; False to compare the embedding `e`.
        first: steps at the beginning that are always computed.
        last: steps at the end that are always computed.
    """

    polynomial: tuple[float, ...]
    projected: bool
    first: int
    last: int


_TABLE: dict[tuple[str, bool], tuple[float, ...]] = {
    ("i2v-540", True): (2.57151496e05, -3.54229917e04, 1.40286849e03, -1.35890334e01, 1.32517977e-01),
    ("i2v-540", False): (-3.02331670e02, 2.23948934e02, -5.25463970e01, 5.87348440e00, -2.01973289e-01),
    ("i2v-720", True): (8.10705460e03, 2.13393892e03, -3.72934672e02, 1.66203073e01, -4.17769401e-02),
    ("i2v-720", False): (-114.36346466, 65.26524496, -18.82220707, 4.91518089, -0.23412683),
    ("1.3b", True): (-5.21862437e04, 9.23041404e03, -5.28275948e02, 1.36987616e01, -4.99875664e-02),
    ("1.3b", False): (2.39676752e03, -1.31110545e03, 2.01331979e02, -8.29855975e00, 1.37887774e-01),
    ("14b", True): (-3.03318725e05, 4.90537029e04, -2.65530556e03, 5.87365115e01, -3.15583525e-01),
    ("14b", False): (-5784.54975374, 5449.50911966, -1811.16591783, 256.27178429, -13.02252404),
}


def teacache_for(*, width: int, image_to_video: bool, pixels: int, projected: bool = True) -> TeaCache:
    """Published coefficients for a model and a size of frame.

    Args:
        width: width of the transformer, in channels.
        image_to_video: True if the model takes an image through channels of its own.
        pixels: pixels of a frame; up to 544 x 960 counts as 540P, more as 720P.
        projected: by `e0` with 5 first steps kept (`use_ret_steps`); otherwise by `e` with the first and last kept.
    """
    if image_to_video:
        row = "i2v-540" if pixels <= 544 * 960 else "i2v-720"
    else:
        row = "1.3b" if width <= _SMALL else "14b"
    return TeaCache(_TABLE[row, projected], projected, *((5, 0) if projected else (1, 1)))


def steps_running_blocks(
    timesteps: Int32[np.ndarray, "R ..."], embedding: Embedding, threshold: float, cache: TeaCache
) -> Bool[np.ndarray, "R"]:
    """True for the steps that run the blocks; the others reuse the last residual.

    Args:
        timesteps: timestep of each step, of all frames or (diffusion forcing) of each frame.
        embedding: embedding of time of the model.
        threshold: sum of estimated changes at which the blocks run again; 0.1 to 0.3 is usual.
        cache: measure, of `teacache_for`.

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
