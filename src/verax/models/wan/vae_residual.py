"""Levels of the video VAE of Wan 2.2, which add a resampled copy of their input to what their layers give.

Follows `modules/vae2_2.py` of Wan 2.2; attributes are the keys of `Wan2.2_VAE.pth`. The copies have no parameters:
frames and pixels become channels, or channels become frames and pixels. Seen as functions of the whole clip, a zero
frame stands before the first where frames are halved, and the first frame is not doubled where they are doubled.
"""

from __future__ import annotations

from flax import nnx
from jax import numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax.errors import UnsupportedModelError
from verax.models.wan.vae_layers import Downsample, Tails, Upsample, residual_blocks

__all__ = ["DownBlock", "UpBlock", "average_down", "duplicate_up", "patchify", "unpatchify"]


class DownBlock(nnx.Module):
    """Residual blocks of one level of the encoder, then half the height and width, and with `time` half the frames.

    Where `time` is None, the last level, the size stays.
    """

    def __init__(
        self, size_in: int, size_out: int, blocks: int, *, time: bool | None, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.factors = (1, 1) if time is None else (1 + time, 2)
        _check_channels(size_in * self.factors[0] * self.factors[1] ** 2, size_out)
        layers = residual_blocks(size_in, size_out, blocks, dtype=dtype, rngs=rngs)
        if time is not None:
            layers.append(Downsample(size_out, time=time, dtype=dtype, rngs=rngs))
        self.downsamples = nnx.List(layers)

    def __call__(self, x: Float[Array, "B T H W C"], tails: Tails) -> Float[Array, "B Tout Hout Wout O"]:
        """Map frames that stand next to those in `tails`."""
        y = x
        for layer in self.downsamples:
            y = layer(y, tails)
        return y + average_down(x, y.shape[-1], *self.factors)


class UpBlock(nnx.Module):
    """Residual blocks of one level of the decoder, then twice the height and width, and with `time` twice the frames.

    Where `time` is None, the last level, the size stays, and no copy is added.
    """

    def __init__(
        self, size_in: int, size_out: int, blocks: int, *, time: bool | None, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.factors = None if time is None else (1 + time, 2)
        layers = residual_blocks(size_in, size_out, blocks, dtype=dtype, rngs=rngs)
        if time is not None:
            _check_channels(size_out * (1 + time) * 4, size_in)
            layers.append(Upsample(size_out, size_out, time=time, dtype=dtype, rngs=rngs))
        self.upsamples = nnx.List(layers)

    def __call__(self, x: Float[Array, "B T H W C"], tails: Tails) -> Float[Array, "B Tout Hout Wout O"]:
        """Map frames that stand next to those in `tails`."""
        y = x
        for layer in self.upsamples:
            y = layer(y, tails)
        if self.factors is None:
            return y
        copy = duplicate_up(x, y.shape[-1], *self.factors)
        return y + copy[:, self.factors[0] - 1 :] if tails.first else y + copy


def _check_channels(size: int, divisor: int) -> None:
    if size % divisor:
        raise UnsupportedModelError(f"dim_mult: {size} channels of a resampled copy do not divide into {divisor}")


def average_down(x: Float[Array, "B T H W C"], channels: int, time: int, space: int) -> Float[Array, "B t h w O"]:
    """Pixels of `time` frames and `space x space` pixels as channels, of which each group's mean is one of `channels`.

    Zero frames stand before the first where the number of frames is not a multiple of `time`.
    """
    x = jnp.pad(x, ((0, 0), (-x.shape[1] % time, 0), (0, 0), (0, 0), (0, 0)))
    B, T, H, W, C = x.shape
    x = x.reshape(B, T // time, time, H // space, space, W // space, space, C).transpose(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(*x.shape[:4], channels, -1).mean(axis=-1)


def duplicate_up(x: Float[Array, "B t h w C"], channels: int, time: int, space: int) -> Float[Array, "B T H W O"]:
    """Each channel repeated, and the repeated channels as `time` frames and `space x space` pixels of `channels`."""
    B, T, H, W, C = x.shape
    x = jnp.repeat(x, channels * time * space**2 // C, axis=-1).reshape(B, T, H, W, channels, time, space, space)
    return x.transpose(0, 1, 5, 2, 6, 3, 7, 4).reshape(B, T * time, H * space, W * space, channels)


def patchify(frames: Float[Array, "B T H W C"], patch: int) -> Float[Array, "B T h w D"]:
    """Squares of `patch x patch` pixels as channels, in the order (colour, column, row)."""
    B, T, H, W, C = frames.shape
    squares = frames.reshape(B, T, H // patch, patch, W // patch, patch, C).transpose(0, 1, 2, 4, 6, 5, 3)
    return squares.reshape(B, T, H // patch, W // patch, C * patch**2)


def unpatchify(squares: Float[Array, "B T h w D"], patch: int) -> Float[Array, "B T H W C"]:
    """Frames of squares: the inverse of `patchify`."""
    B, T, H, W, D = squares.shape
    frames = squares.reshape(B, T, H, W, D // patch**2, patch, patch).transpose(0, 1, 2, 6, 3, 5, 4)
    return frames.reshape(B, T, H * patch, W * patch, -1)
