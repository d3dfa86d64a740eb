"""TAEHV's tiny decoder (madebyollin/taehv, `taew2_1` and `taew2_2`): latents of Wan's VAEs to frames at a small cost.

Module paths are the keys of the published files, whose encoder is not used. The decoder takes the latents as the
transformer has them, normalised; LightX2V's decoders of the same layout (`lighttaew2_1`, `lighttaew2_2`) were trained
for the latents of the VAE, whose mean and standard deviation are not taken out. A block sees its input and its input
one frame ago, so that the decoder is causal in time and can be run in chunks of frames of any size, with the same
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax import ops
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.models.wan.vae import WanVaeConfig
from verax.models.wan.vae_layers import ByPlace, Tails, chunk_sizes, in_chunks, in_tiles
from verax.nn import Conv2d

__all__ = ["TinyDecoder", "TinyDecoderConfig"]

BLOCKS = 3
"""Blocks with memory of each of the first three levels."""

LEVEL = BLOCKS + 3
"""Places in the published `Sequential` from one level to the next: its blocks, enlarging, frames and a convolution."""


@dataclass(frozen=True)
class TinyDecoderConfig:
    """Sizes of a tiny decoder.

    Attributes:
        z_dim: channels of a latent.
        widths: channels of each of the four levels; between two, height and width double.
        frames: factor of the number of frames between two levels.
        patch: height and width of the squares of pixels that are channels of the last layer.
        latents_mean, latents_std: of each channel, for a decoder of latents that are not normalised; else empty.
    """

    z_dim: int = 16
    widths: tuple[int, int, int, int] = (256, 128, 64, 64)
    frames: tuple[int, int, int] = (1, 2, 2)
    patch: int = 1
    latents_mean: tuple[float, ...] = ()
    latents_std: tuple[float, ...] = ()

    @property
    def frames_per_latent(self) -> int:
        """Frames for each latent after the first, which stands for one frame."""
        return self.frames[0] * self.frames[1] * self.frames[2]

    @property
    def pixels_per_latent(self) -> int:
        """Pixels in height, and in width, for each of a latent."""
        return 8 * self.patch

    @property
    def halo(self) -> int:
        """Latents at each side of a tile that its pixels depend on."""
        # Three convolutions of each block and the first one; each further level enlarges what came before.
        depth = 3 * BLOCKS + 1
        for convolutions in (3 * BLOCKS + 1, 3 * BLOCKS + 1, 2):
            depth = 2 * depth + convolutions
        return -(-depth // 8)

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], where: Path, *, vae: WanVaeConfig | None = None
    ) -> TinyDecoderConfig:
        """Read the sizes off the shapes of a file's weights.

        `where`: path of the file, whose name alone says that it is LightX2V's, as in its own code. `vae`: VAE of the
        latents.
        """
        if "decoder.1.conv.0.weight" in shapes:
            raise UnsupportedModelError(
                f"{where}: TAEHV's super decoder is not implemented; use the file without _super"
            )
        ends, grows = (1, *(LEVEL * level + 2 for level in (1, 2, 3))), [LEVEL * level + 1 for level in (1, 2, 3)]
        names = [*(f"decoder.{i}.weight" for i in (*ends, ends[-1] + 2)), *(f"decoder.{i}.conv.weight" for i in grows)]
        if absent := [name for name in names if len(shapes.get(name, ())) != 4]:
            raise CheckpointError(f"{where}: not a decoder of TAEHV: it has no {absent[0]} of a convolution of images")
        grown = [shapes[name] for name in names[-3:]]
        colors = shapes[names[4]][0]
        patch = round((colors / 3) ** 0.5)
        if colors != 3 * patch**2 or any(out % size for out, size, *_ in grown):
            raise CheckpointError(f"{where}: not a decoder of TAEHV: {names[4]} has {colors} output channels")
        first, second, third = (out // size for out, size, *_ in grown)
        a, b, c, d = (shapes[name][0] for name in names[:4])
        config = cls(shapes[names[0]][1], (a, b, c, d), (first, second, third), patch)
        if vae is None or "lighttae" not in where.name:
            return config
        return replace(config, latents_mean=vae.latents_mean, latents_std=vae.latents_std)


class _Conv(Conv2d):
    """Convolution of images that may have no bias."""

    def __init__(self, size_in: int, size_out: int, kernel: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(size_in, size_out, (kernel, kernel), padding=kernel // 2, dtype=dtype, rngs=rngs)
        if not bias:
            del self.bias

    def __call__(self, x: Float[Array, "*B H W C"]) -> Float[Array, "*B H W O"]:
        """Convolve each image."""
        bias = self.bias[...] if hasattr(self, "bias") else None
        images = x.reshape(-1, *x.shape[-3:])
        return ops.conv2d(images, self.weight[...], bias, padding=self.padding).reshape(*x.shape[:-1], -1)


class MemoryBlock(nnx.Module):
    """Three convolutions of a frame and the frame before it, added to the frame."""

    def __init__(self, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        conv = partial(_Conv, kernel=3, bias=True, dtype=dtype, rngs=rngs)
        self.conv = ByPlace({0: conv(2 * size, size), 2: conv(size, size), 4: conv(size, size)})

    def __call__(self, x: Float[Array, "B T H W C"], tails: Tails) -> Float[Array, "B T H W C"]:
        """Map frames that stand next to the frame in `tails`."""
        past = jnp.concatenate([tails.before(x, 1), x], axis=1)[:, :-1]
        y = jax.nn.relu(self.conv[0](jnp.concatenate([x, past], axis=-1)))
        return jax.nn.relu(self.conv[4](jax.nn.relu(self.conv[2](y))) + x)


class MoreFrames(nnx.Module):
    """A convolution of one pixel, whose output has the channels of `factor` frames."""

    def __init__(self, size: int, factor: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.conv = _Conv(size, size * factor, 1, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B Tout H W C"]:
        """`factor` frames for each."""
        B, T, H, W, C = x.shape
        return self.conv(x).reshape(B, T, H, W, -1, C).transpose(0, 1, 4, 2, 3, 5).reshape(B, -1, H, W, C)


class TinyDecoder(nnx.Module):
    """Decoder of latents, in the dtype of its weights."""

    ignored_weights = (r"^encoder\.",)

    def __init__(self, config: TinyDecoderConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        options = {"dtype": dtype, "rngs": rngs}
        widths = config.widths
        layers: dict[int, nnx.Module] = {1: _Conv(config.z_dim, widths[0], 3, bias=True, **options)}
        for level, (size, factor, size_out) in enumerate(zip(widths[:3], config.frames, widths[1:], strict=True)):
            begin = LEVEL * level + 3
            layers |= {begin + i: MemoryBlock(size, **options) for i in range(BLOCKS)}
            layers[begin + BLOCKS + 1] = MoreFrames(size, factor, **options)
            layers[begin + BLOCKS + 2] = _Conv(size, size_out, 3, bias=False, **options)
        layers[3 * LEVEL + 4] = _Conv(widths[3], 3 * config.patch**2, 3, bias=True, **options)
        self.decoder = ByPlace(layers)

    def decode(
        self,
        latents: Float[Array, "B F h w Z"],
        *,
        chunk: int | None = None,
        tile: tuple[int, int] | None = None,
        axes: tuple[str, ...] = (),
    ) -> Float[Array, "B T H W C"]:
        """Frames of normalised latents, from -1 to 1, float32: see `VideoAutoencoder.decode`."""
        if latents.shape[-1] != self.config.z_dim or 0 in latents.shape:
            raise InvalidParameterError(
                f"latents: expected [B, F, h, w, {self.config.z_dim}], none zero, got {list(latents.shape)}"
            )
        if self.config.latents_std:
            latents = latents * jnp.array(self.config.latents_std) + jnp.array(self.config.latents_mean)
        first, size = chunk_sizes(latents.shape[1], chunk)
        if tile is None:
            return in_chunks(self._frames, latents, first, size)
        halo, scale = self.config.halo, self.config.pixels_per_latent
        return in_tiles(lambda part: in_chunks(self._frames, part, first, size), latents, tile, halo, scale, axes)

    def _frames(self, latents: Float[Array, "B F h w Z"], tails: Tails) -> Float[Array, "B T H W C"]:
        """Frames of a chunk. The clip's first latent stands for one frame, the last of those that the layers make."""
        layers = self.decoder
        x = 3 * jnp.tanh(latents.astype(layers[1].weight.dtype) / 3)
        x = jax.nn.relu(layers[1](x))
        for level in range(3):
            begin = LEVEL * level + 3
            for i in range(BLOCKS):
                x = layers[begin + i](x, tails)
            x = layers[begin + BLOCKS + 1](jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3))
            x = layers[begin + BLOCKS + 2](x)
        x = layers[3 * LEVEL + 4](jax.nn.relu(x))
        if tails.first:
            x = x[:, self.config.frames_per_latent - 1 :]
        B, T, H, W, _ = x.shape
        p = self.config.patch
        squares = x.reshape(B, T, H, W, 3, p, p).transpose(0, 1, 2, 5, 3, 6, 4).reshape(B, T, H * p, W * p, 3)
        return 2 * jnp.clip(squares.astype(jnp.float32), 0, 1) - 1
