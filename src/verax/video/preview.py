"""Pictures of a clip while it is made: of the clean clip that the transformer predicts in a step."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from verax.models.images import resize
from verax.video.networks import Stages

_PATCHES = 16
"""Rows and columns of latents in the image of random colours to which the map is fitted."""

_SIDE = 256
"""Longer side of a preview in pixels."""


class Previewer:
    """Callable that makes a picture of one latent frame: by the tiny decoder, or without one by a linear map.

    A latent stands for a square of pixels, and its channels give the square's mean colour almost linearly. ComfyUI has
    such factors for some models; here they are fitted, once, to an image of known colours. Nothing is compiled or
    fitted before the first picture.

    `pixels_per_latent`: height and width of a latent in pixels.
    """

    def __init__(self, stages: Stages, pixels_per_latent: int):
        self._stages, self._pixels = stages, pixels_per_latent
        self._factors: np.ndarray | None = None

    def __call__(self, latents: Float[np.ndarray, "1 1 h w C"]) -> UInt8[np.ndarray, "H W 3"]:
        """Picture of a latent frame, at its size or with a longer side of 256 pixels."""
        if self._stages.decoder is not self._stages.vae:
            return np.asarray(self._stages.finish(self._stages.decode_call(latents)(jnp.asarray(latents))))[0]
        if self._factors is None:
            self._factors = fit_colors(self._stages.encode, self._pixels)
        colors = np.clip(_with_ones(latents[0, 0]) @ self._factors, 0, 255).astype(np.uint8)
        height, width, _ = colors.shape
        scale = _SIDE / max(height, width)
        return resize(colors, max(1, round(height * scale)), max(1, round(width * scale)), method="bicubic")


def fit_colors(encode: Callable[[np.ndarray], object], pixels_per_latent: int) -> Float[np.ndarray, "C_and_1 3"]:
    """Linear map from a latent's channels and 1 to a colour from 0 to 255.

    `encode`: VAE's encoder: uint8 `[1, 1, H, W, 3]` to latents `[1, 1, h, w, C]`.
    """
    colors = np.random.default_rng(0).integers(0, 256, (_PATCHES // 4, _PATCHES // 4, 3), np.uint8)
    image = colors.repeat(4 * pixels_per_latent, axis=0).repeat(4 * pixels_per_latent, axis=1)
    latents = np.asarray(encode(image[None, None]), np.float32)[0, 0]
    known = colors.repeat(4, axis=0).repeat(4, axis=1).reshape(-1, 3)
    return np.linalg.lstsq(_with_ones(latents).reshape(len(known), -1), known, rcond=1e-3)[0]


def _with_ones(latents: np.ndarray) -> np.ndarray:
    """Latents with a constant as the last channel."""
    return np.concatenate([latents, np.ones((*latents.shape[:-1], 1), latents.dtype)], axis=-1)
