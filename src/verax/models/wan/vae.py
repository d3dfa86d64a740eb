"""The video VAEs of Wan 2.1, SkyReels-V2 and Wan 2.2 (Wan Team, 2025, arXiv:2503.20314): clips to latents and back.

Follows `modules/vae.py` of Wan 2.1 and `modules/vae2_2.py` of Wan 2.2; module paths are the keys of `Wan2.1_VAE.pth`
and `Wan2.2_VAE.pth`. Both directions are causal in time and can be run in chunks of frames of any size, with the same
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import Depth, Finite, Positive, Size, read_fields
from verax.models.wan.vae_layers import (
    AttentionBlock,
    DownBlock,
    Downsample,
    Head,
    ResidualBlock,
    Tails,
    UpBlock,
    Upsample,
    chunk_sizes,
    in_chunks,
    in_tiles,
    patchify,
    residual_blocks,
    unpatchify,
)
from verax.nn import CausalConv3d

__all__ = ["WanVae", "WanVaeConfig"]

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
    """Sizes by the names of diffusers' config.json; the defaults are the sizes of Wan 2.1, which has no such file.

    Attributes:
        base_dim: channels of the encoder at full resolution; `decoder_base_dim` of the decoder, the same if None.
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
        """Read the config.json of diffusers' `AutoencoderKLWan`; an empty one is the published model's."""
        if config.get("attn_scales"):
            raise UnsupportedModelError(
                f"a video VAE with attn_scales {config['attn_scales']!r} is not supported; the VAEs of Wan and "
                "SkyReels-V2 have none"
            )
        return cls(**read_fields(config, cls))


LOG_VARIANCE = (-30.0, 20.0)
"""Between these the logarithm of a variance is kept, as everywhere since Stable Diffusion's VAE."""


class Encoder(nnx.Module):
    """Frames to twice as many channels as a latent has."""

    def __init__(self, config: WanVaeConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        sizes = [config.base_dim * multiple for multiple in (1, *config.dim_mult)]
        self.patch = config.patch
        self.conv1 = CausalConv3d(config.in_channels, sizes[0], (3, 3, 3), padding=1, dtype=dtype, rngs=rngs)
        layers = []
        for size, size_out, time in zip(sizes, sizes[1:], (*config.temperal_downsample, None), strict=False):
            level = residual_blocks(size, size_out, config.num_res_blocks, dtype=dtype, rngs=rngs)
            if time is not None:
                level.append(Downsample(size_out, time=time, dtype=dtype, rngs=rngs))
            layers += [DownBlock(level, size, size_out, time)] if config.is_residual else level
        self.downsamples = nnx.List(layers)
        size = sizes[-1]
        self.middle = nnx.List(_middle(size, dtype=dtype, rngs=rngs))
        self.head = Head(size, 2 * config.z_dim, dtype=dtype, rngs=rngs)

    def __call__(self, frames: Float[Array, "B T H W C"], tails: Tails) -> Float[Array, "B F h w Z"]:
        x = tails.convolve(self.conv1, patchify(frames, self.patch))
        for layer in (*self.downsamples, *self.middle):
            x = layer(x, tails)
        return self.head(x, tails)


class Decoder(nnx.Module):
    """Latents to frames."""

    def __init__(self, config: WanVaeConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        sizes = [(config.decoder_base_dim or config.base_dim) * multiple for multiple in reversed(config.dim_mult)]
        self.patch = config.patch
        size, blocks = sizes[0], config.num_res_blocks + 1
        self.conv1 = CausalConv3d(config.z_dim, size, (3, 3, 3), padding=1, dtype=dtype, rngs=rngs)
        self.middle = nnx.List(_middle(size, dtype=dtype, rngs=rngs))
        layers = []
        for size_out, time in zip(sizes, (*reversed(config.temperal_downsample), None), strict=True):
            level = residual_blocks(size, size_out, blocks, dtype=dtype, rngs=rngs)
            size_in, size = size, size_out if config.is_residual or time is None else size_out // 2
            if time is not None:
                level.append(Upsample(size_out, size, time=time, dtype=dtype, rngs=rngs))
            layers += [UpBlock(level, size_in, size_out, time)] if config.is_residual else level
        self.upsamples = nnx.List(layers)
        self.head = Head(size, config.out_channels, dtype=dtype, rngs=rngs)

    def __call__(self, latents: Float[Array, "B F h w Z"], tails: Tails) -> Float[Array, "B T H W C"]:
        return self.enlarge(self.begin(latents, tails), tails)

    def begin(self, latents: Float[Array, "B F h w Z"], tails: Tails) -> Float[Array, "B F h w D"]:
        """All that is at the latents' resolution and sees a whole frame."""
        x = tails.convolve(self.conv1, latents)
        for layer in self.middle:
            x = layer(x, tails)
        return x

    def enlarge(self, x: Float[Array, "B F h w D"], tails: Tails) -> Float[Array, "B T H W C"]:
        """The rest, where a pixel depends on its neighbourhood only."""
        for layer in self.upsamples:
            x = layer(x, tails)
        return unpatchify(self.head(x, tails), self.patch)


def _middle(size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> list[nnx.Module]:
    """Layers at the lowest resolution of encoder and decoder."""
    return [
        ResidualBlock(size, size, dtype=dtype, rngs=rngs),
        AttentionBlock(size, dtype=dtype, rngs=rngs),
        ResidualBlock(size, size, dtype=dtype, rngs=rngs),
    ]


class WanVae(nnx.Module):
    """Encoder, whose weights are float32, and decoder, whose weights have `dtype`.

    Errors of encoding spread from the first picture through the whole clip; errors of decoding do not. Where weights
    are bfloat16, the inputs of convolutions and attention are rounded; norms, sums and latents are float32.
    """

    def __init__(self, config: WanVaeConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        Z = config.z_dim
        self.encoder = Encoder(config, dtype=jnp.float32, rngs=rngs)
        self.conv1 = CausalConv3d(2 * Z, 2 * Z, (1, 1, 1), dtype=jnp.float32, rngs=rngs)
        self.conv2 = CausalConv3d(Z, Z, (1, 1, 1), dtype=dtype, rngs=rngs)
        self.decoder = Decoder(config, dtype=dtype, rngs=rngs)

    def encode(self, frames: Float[Array, "B T H W C"], *, chunk: int | None = None) -> Float[Array, "B F h w Z"]:
        """The most likely latents of a clip, normalised. Float32.

        `frames`: colours between -1 and 1; `T = 1 + n * frames_per_latent`, and height and width are divisible by
        `pixels_per_latent`: 4n + 1 and 8 for the published model. `chunk`: latents at a time, which bounds memory and
        changes nothing else; None is all.
        """
        return self.normalize(self.encode_distribution(frames, chunk=chunk)[0])

    def encode_distribution(
        self, frames: Float[Array, "B T H W C"], *, chunk: int | None = None
    ) -> tuple[Float[Array, "B F h w Z"], Float[Array, "B F h w Z"]]:
        """Mean and log variance of a clip's latents, not normalised. Float32; arguments as for `encode`."""
        _, T, H, W, _ = frames.shape
        ratio, pixels = self.config.frames_per_latent, self.config.pixels_per_latent
        if T % ratio != 1 % ratio or T == 0:
            lower = max(1, (T - 1) // ratio * ratio + 1)
            raise InvalidParameterError(
                f"frames: expected {ratio}n + 1 of them, got {T}; {lower} and {lower + ratio} are the nearest"
            )
        if H % pixels or W % pixels or 0 in (H, W):
            raise InvalidParameterError(f"frames: expected height and width divisible by {pixels}, got {H} x {W}")
        first, size = chunk_sizes((T - 1) // ratio + 1, chunk)
        z = in_chunks(
            lambda x, tails: self.conv1(self.encoder(x, tails)).astype(jnp.float32),
            frames.astype(jnp.float32),
            1 + (first - 1) * ratio,
            size * ratio,
        )
        mean, log_variance = jnp.split(z, 2, axis=-1)
        return mean, jnp.clip(log_variance, *LOG_VARIANCE)

    def decode(
        self,
        latents: Float[Array, "B F h w Z"],
        *,
        chunk: int | None = None,
        tile: tuple[int, int] | None = None,
        axes: tuple[str, ...] = (),
    ) -> Float[Array, "B T H W C"]:
        """The clip of normalised latents: `1 + (F - 1) * frames_per_latent` frames, colours from -1 to 1. Float32.

        `tile`: height and width in latents that are decoded at a time. Each tile is computed with its neighbourhood
        (`config.halo` latents at each side, which cost as much as those that are kept), so that the result is the same
        and needs no blending.
        """
        if latents.shape[-1] != self.config.z_dim or 0 in latents.shape:
            raise InvalidParameterError(
                f"latents: expected [B, F, h, w, {self.config.z_dim}], none zero, got {list(latents.shape)}"
            )
        if tile is not None and min(tile) < 1:
            raise InvalidParameterError(f"tile: expected a height and a width from 1, got {tile}")
        first, size = chunk_sizes(latents.shape[1], chunk)
        z = self.denormalize(latents)

        def begin(z: Array, tails: Tails) -> Array:
            return self.decoder.begin(self.conv2(z), tails)

        def enlarge(x: Array, tails: Tails) -> Array:
            return jnp.clip(self.decoder.enlarge(x, tails).astype(jnp.float32), -1.0, 1.0)

        if tile is None or (tile[0] >= z.shape[2] and tile[1] >= z.shape[3]):
            return in_chunks(lambda z, tails: enlarge(begin(z, tails), tails), z, first, size)
        x = in_chunks(begin, z, first, size)
        halo, scale = self.config.halo, self.config.pixels_per_latent
        return in_tiles(lambda part: in_chunks(enlarge, part, first, size), x, tile, halo, scale, axes)

    def normalize(self, latents: Float[Array, "*B Z"]) -> Float[Array, "*B Z"]:
        """Latents with the mean and standard deviation of the training data taken out of each channel."""
        return (latents.astype(jnp.float32) - self._statistic("latents_mean")) / self._statistic("latents_std")

    def denormalize(self, latents: Float[Array, "*B Z"]) -> Float[Array, "*B Z"]:
        """Latents in the decoder's range: the inverse of `normalize`."""
        return latents.astype(jnp.float32) * self._statistic("latents_std") + self._statistic("latents_mean")

    def _statistic(self, name: str) -> Float[Array, "Z"]:
        return jnp.asarray(getattr(self.config, name), jnp.float32)
