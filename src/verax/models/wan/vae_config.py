"""Sizes of the video VAEs of Wan 2.1, SkyReels-V2 and Wan 2.2 (Wan Team, 2025, arXiv:2503.20314)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verax.errors import UnsupportedModelError
from verax.fields import Depth, Finite, Positive, Size, read_fields

__all__ = ["WanVaeConfig"]

# fmt: off
PUBLISHED_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
PUBLISHED_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
# fmt: on


@dataclass(frozen=True)
class WanVaeConfig:
    """Sizes by the names of diffusers' config.json; the defaults are those of Wan 2.1, which has no such file.

    Attributes:
        base_dim: channels of the encoder at full resolution; `decoder_base_dim` those of the decoder, the same if None.
        z_dim: channels of a latent.
        dim_mult: channels at each resolution, in multiples; between two, height and width halve.
        num_res_blocks: residual blocks at each resolution of the encoder. The decoder has one more.
        temperal_downsample: where also frames halve (diffusers' spelling).
        latents_mean, latents_std: of each channel of the latents, over the training data.
        in_channels, out_channels: channels of the encoder's input and of the decoder's result: 3 for each pixel of a
            patch.
        is_residual: True for Wan 2.2's, whose levels add a resampled copy of their input.
        patch_size: height and width of the squares of pixels that are channels of the first layer; 1 if None.
    """

    base_dim: Size = 96
    decoder_base_dim: Size | None = None
    z_dim: Size = 16
    dim_mult: tuple[Size, ...] = (1, 2, 4, 4)
    num_res_blocks: Depth = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[Finite, ...] = PUBLISHED_MEAN
    latents_std: tuple[Positive, ...] = PUBLISHED_STD
    in_channels: Size = 3
    out_channels: Size = 3
    is_residual: bool = False
    patch_size: Size | None = None

    def __post_init__(self) -> None:
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) != 3 * self.patch**2:
                raise UnsupportedModelError(
                    f"{name} {getattr(self, name)} with patch_size {self.patch_size} is not supported: expected "
                    f"{3 * self.patch**2}"
                )
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            raise UnsupportedModelError(
                f"temperal_downsample has {len(self.temperal_downsample)} entries, expected {len(self.dim_mult) - 1}: "
                f"one between each two of dim_mult {list(self.dim_mult)}"
            )
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise UnsupportedModelError(
                    f"{name} has {len(getattr(self, name))} entries, expected z_dim, {self.z_dim}"
                )

    @property
    def frames_per_latent(self) -> int:
        """Frames for each latent after the first, which stands for one frame."""
        return 2 ** sum(self.temperal_downsample)

    @property
    def patch(self) -> int:
        """Pixels in height, and in width, of the squares that are channels of the first layer."""
        return self.patch_size or 1

    @property
    def pixels_per_latent(self) -> int:
        """Pixels in height, and in width, for each of a latent."""
        return self.patch * 2 ** len(self.temperal_downsample)

    @property
    def halo(self) -> int:
        """Latents at each side of a tile that its pixels depend on."""
        depth = 0  # squares from an edge that is not the frame's, to where it no longer shows
        for level in range(len(self.dim_mult)):
            if level:
                depth = 2 * depth + 1  # enlarged, and a convolution
            depth += 2 * (self.num_res_blocks + 1)
        return -(-(depth + 1) * self.patch // self.pixels_per_latent)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> WanVaeConfig:
        """Read the config.json of diffusers' `AutoencoderKLWan`; an empty one is the published model's.

        Raises:
            UnsupportedModelError: for attention elsewhere than in the middle, or sizes that contradict each other.
            CheckpointError: for a value of a wrong type, or a size that no model has.
        """
        if config.get("attn_scales"):
            raise UnsupportedModelError(
                f"a video VAE with attn_scales {config['attn_scales']!r} is not supported; those of Wan and "
                "SkyReels-V2 have none"
            )
        return cls(**read_fields(config, cls))
