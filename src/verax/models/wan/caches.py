"""Published measures of step caches for Wan and SkyReels-V2: TeaCache's coefficients and MagCache's curves."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import Float

from verax.files import read_json
from verax.models.video_model import TeaCache

_SMALL = 2048
"""Width up to which a model counts as 1.3B (which is 1,536 wide; 14B is 5,120)."""

_TEACACHE: dict[str, tuple[float, ...]] = {
    "i2v-540": (2.57151496e05, -3.54229917e04, 1.40286849e03, -1.35890334e01, 1.32517977e-01),
    "i2v-720": (8.10705460e03, 2.13393892e03, -3.72934672e02, 1.66203073e01, -4.17769401e-02),
    "1.3b": (-5.21862437e04, 9.23041404e03, -5.28275948e02, 1.36987616e01, -4.99875664e-02),
    "14b": (-3.03318725e05, 4.90537029e04, -2.65530556e03, 5.87365115e01, -3.15583525e-01),
}
"""Coefficients of the authors' `use_ret_steps`, which compares time's projected embeddings and keeps 5 first steps."""


def teacache_for(*, width: int, image_to_video: bool, pixels: int) -> TeaCache:
    """Coefficients that the authors of TeaCache fitted to a model and a size of frame.

    Args:
        image_to_video: True if the model takes an image through channels of its own.
        pixels: pixels of a frame; up to 544 x 960 counts as 540P, more as 720P.
    """
    if image_to_video:
        row = "i2v-540" if pixels <= 544 * 960 else "i2v-720"
    else:
        row = "1.3b" if width <= _SMALL else "14b"
    return TeaCache(_TEACACHE[row], kept=5)


_CURVES = Path(__file__).with_name("magcache.json")
"""Magnitude ratios that MagCache's authors measured (Zehong-Ma/MagCache, `MagCache4Wan2.1` and `MagCache4Wan2.2`), of
each step and of the prompt and the negative prompt: 50 steps, 40 for image to video and Wan2.2's pairs."""


@cache
def _curves() -> dict[str, Float[np.ndarray, "N 2"]]:
    return {name: np.stack([curve["prompt"], curve["negative"]], axis=1) for name, curve in read_json(_CURVES).items()}


def magcache_for(
    kind: str, *, width: int, experts: bool, pixels: int, has_image: bool
) -> Float[np.ndarray, "N 2"] | None:
    """Curve of a kind and size of model; None if none was published, as for diffusion forcing and a small I2V.

    Args:
        kind: see `VideoSettings.kind`.
        width: width of a token.
        experts: True for two transformers, of high and of low noise.
        pixels: pixels of a frame; up to 480 x 832 counts as 480P, more as 720P.
        has_image: True for a clip that begins with an image.
    """
    size = "1.3b" if width <= _SMALL else "14b"
    if experts:
        name = f"{kind}-a14b"
    elif kind == "i2v":
        name = ("i2v-480p" if pixels <= 480 * 832 else "i2v-720p") if size == "14b" else ""
    elif kind == "ti2v":
        name = "ti2v-image" if has_image else "ti2v-text"
    else:
        # The authors use the curve of T2V's 14B for VACE's, which was made of it.
        name = "t2v-14b" if (kind, size) == ("vace", "14b") else f"{kind}-{size}"
    return _curves().get(name)
