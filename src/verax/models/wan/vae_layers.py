"""Layers of Wan's video VAEs (Wan Team, 2025, arXiv:2503.20314), each a causal function of a whole clip that can also
be run on one chunk of frames after another.

Follows `modules/vae.py` of Wan 2.1 and SkyReels-V2, and `modules/vae2_2.py` of Wan 2.2; attributes are the keys of
their checkpoints. There, frames are fed one latent at a time with special cases for the first. As functions of the
whole clip, the special cases are two. The first frame is neither doubled in time nor seen by the convolution that
doubles the others. The layers that halve the number of frames keep the first frame unchanged.

The levels of Wan 2.2 add a resampled copy of their input to what their layers give. The copies have no parameters:
frames and pixels become channels, or channels become frames and pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax import ops
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.nn import CausalConv3d, Conv2d


class Tails:
    """Last input frames of each causal layer, passed from one chunk of a clip to the next.

    Layers ask in the order in which they run, which is the same for every chunk.

    `first`: True if the chunk begins the clip. `kept`: frames for the next chunk, once all layers have run.
    """

    def __init__(self, earlier: Sequence[Array] | None = None):
        self.first = earlier is None
        self.kept: list[Array] = []
        self._earlier = iter(earlier or ())

    def before(self, x: Float[Array, "B T H W C"], frames: int) -> Float[Array, "B P H W C"]:
        """The `frames` frames that stand before the chunk `x`, zeros at the beginning; the last ones are kept."""
        B, _, *pixel = x.shape
        earlier = jnp.zeros((B, frames, *pixel), x.dtype) if self.first else next(self._earlier)
        self.kept.append(jnp.concatenate([earlier, x[:, -frames:]], axis=1)[:, -frames:])
        return earlier

    def convolve(self, layer: CausalConv3d, x: Float[Array, "B T H W C"]) -> Float[Array, "B T Hout Wout O"]:
        """A convolution of stride 1 in time, which sees the chunk before."""
        frames = layer.weight.shape[2] - 1
        if frames == 0:
            return layer(x)
        before = self.before(x, frames)
        return layer(x, None if self.first else before)


Network = Callable[[Float[Array, "B T H W C"], Tails], Float[Array, "B Tout Hout Wout O"]]


def chunk_sizes(latents: int, chunk: int | None) -> tuple[int, int]:
    """Latents of the first chunk, and of each other."""
    if chunk is not None and chunk < 1:
        raise InvalidParameterError(f"chunk: expected at least 1 latent, or None for all, got {chunk}")
    size = chunk or latents
    return 1 + (latents - 1) % size, size


def in_chunks(
    network: Network, x: Float[Array, "B T H W C"], first: int, size: int
) -> Float[Array, "B Tout Hout Wout O"]:
    """Run a causal network over the first `first` frames, then over `size` frames at a time in one scan.

    It takes the memory of one chunk. `size` divides the number of frames after the first ones.
    """
    tails = Tails()
    y = network(x[:, :first], tails)
    if first == x.shape[1]:
        return y

    def step(kept: tuple[Array, ...], frames: Array) -> tuple[tuple[Array, ...], Array]:
        tails = Tails(kept)
        out = network(frames, tails)
        return tuple(tails.kept), out

    B, T, *pixel = x.shape
    chunks = jnp.moveaxis(x[:, first:].reshape(B, (T - first) // size, size, *pixel), 1, 0)
    _, rest = jax.lax.scan(step, tuple(tails.kept), chunks)
    return jnp.concatenate([y, jnp.moveaxis(rest, 0, 1).reshape(B, -1, *y.shape[2:])], axis=1)


def in_tiles(
    enlarge: Callable[[Float[Array, "B F h w D"]], Float[Array, "B T H W C"]],
    x: Float[Array, "B F h w D"],
    tile: tuple[int, int],
    halo: int,
    scale: int,
    axes: tuple[str, ...] = (),
) -> Float[Array, "B T H W C"]:
    """Enlarge frames by `scale`, a tile after the other with `halo` pixels around it, in one loop.

    All tiles are of one size, and so are the parts that they are cut from: at the frame's edges these are moved
    inwards, which makes their halo larger, and the last tile may repeat pixels of the one before.

    Inside `jax.shard_map` over the mesh's `axes`, each device takes every n-th tile of `x`, which all of them have, and
    gets the tiles of the others.
    """
    sides = list(zip(x.shape[2:4], tile, strict=True))
    kept = tuple(min(pair) for pair in sides)
    cut = tuple(min(length, side + 2 * halo) for length, side in sides)
    corners = [[*range(0, length - side, side), length - side] for (length, _), side in zip(sides, kept, strict=True)]
    starts = jnp.asarray(list(itertools.product(*corners)))
    part = (*x.shape[:2], *cut, x.shape[4])
    B, T, *_, C = jax.eval_shape(enlarge, jax.ShapeDtypeStruct(part, x.dtype)).shape
    limits = jnp.asarray([length - size for (length, _), size in zip(sides, cut, strict=True)])
    devices = jax.lax.axis_size(axes) if axes else 1

    def pixels_of(i: Array) -> Array:
        begin = jnp.clip(starts[i] - halo, 0, limits)
        large = enlarge(jax.lax.dynamic_slice(x, (0, 0, *begin, 0), part))
        inner = (starts[i] - begin) * scale
        return jax.lax.dynamic_slice(large, (0, 0, *inner, 0), (B, T, *(side * scale for side in kept), C))

    def put(frames: Array, i: Array, pixels: Array) -> Array:
        return jax.lax.dynamic_update_slice(frames, pixels, (0, 0, *(starts[i] * scale), 0))

    def one(i: Array, frames: Array) -> Array:
        return put(frames, i, pixels_of(i))

    def one_of_each(i: Array, frames: Array) -> Array:
        # The last tile again where tiles do not divide among the devices.
        mine, last = i * devices + jax.lax.axis_index(axes), len(starts) - 1
        tiles = jax.lax.all_gather(pixels_of(jnp.minimum(mine, last)), axes)
        for device in range(devices):
            frames = put(frames, jnp.minimum(i * devices + device, last), tiles[device])
        return frames

    frames = jnp.zeros((B, T, *(length * scale for length, _ in sides), C), jnp.float32)
    return jax.lax.fori_loop(0, -(-len(starts) // devices), one_of_each if axes else one, frames)


class ChannelNorm(nnx.Module):
    """Each pixel divided by the root mean square of its channels, times `gamma`; with `silu`, SiLU of it."""

    def __init__(self, size: int, *, axes: int, dtype: DTypeLike):
        self.gamma = nnx.Param(jnp.ones((size, *(1,) * axes), dtype))

    def __call__(self, x: Float[Array, "*B C"], *, silu: bool = False, dtype: DTypeLike) -> Float[Array, "*B C"]:
        """Normalise the last axis in float32; the result is rounded to `dtype`."""
        gamma = self.gamma[...].reshape(-1)
        # The reference divides by the larger of the channels' L2 norm and 1e-12, then multiplies by sqrt(C).
        return ops.rms_norm(x, gamma, 1e-24 / gamma.size, silu=silu, dtype=dtype)


class ByPlace(nnx.Module):
    """Layers by their places in a PyTorch `Sequential`: those between have no parameters."""

    def __init__(self, layers: Mapping[int, nnx.Module]):
        for place, layer in layers.items():
            setattr(self, str(place), layer)

    def __getitem__(self, place: int) -> Any:
        return getattr(self, str(place))


class Layers(ByPlace):
    """Normalisations and convolutions by turns, each pair with SiLU between: `norm, SiLU, conv` from even places."""

    def __init__(self, layers: dict[int, nnx.Module]):
        self.pairs = tuple(zip(list(layers)[::2], list(layers)[1::2], strict=True))
        super().__init__(layers)

    def __call__(self, x: Float[Array, "B T H W C"], tails: Tails) -> Float[Array, "B T H W O"]:
        """Each pair in turn on a chunk of frames, which `tails` continues."""
        for norm, conv in self.pairs:
            x = tails.convolve(self[conv], self[norm](x, silu=True, dtype=self[conv].weight.dtype))
        return x


class ResidualBlock(nnx.Module):
    """Two convolutions, each after a norm and SiLU; added to the input, which is float32."""

    def __init__(self, size_in: int, size_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def conv(size: int, kernel: int) -> CausalConv3d:
            return CausalConv3d(size, size_out, (kernel, kernel, kernel), padding=kernel // 2, dtype=dtype, rngs=rngs)

        self.residual = Layers(
            {
                0: ChannelNorm(size_in, axes=3, dtype=dtype),
                2: conv(size_in, 3),
                3: ChannelNorm(size_out, axes=3, dtype=dtype),
                6: conv(size_out, 3),
            }
        )
        self.shortcut = conv(size_in, 1) if size_in != size_out else None

    def __call__(self, x: Float[Array, "B T H W C"], tails: Tails) -> Float[Array, "B T H W O"]:
        """Map frames that stand next to those in `tails`."""
        kept = x if self.shortcut is None else self.shortcut(x)
        return kept + self.residual(x, tails)


def residual_blocks(size_in: int, size_out: int, count: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> list[nnx.Module]:
    """Residual blocks of one level, the first of which changes the number of channels."""
    sizes = [size_in, *[size_out] * count]
    return [ResidualBlock(*pair, dtype=dtype, rngs=rngs) for pair in itertools.pairwise(sizes)]


class Head(Layers):
    """The network's last normalisation, SiLU and convolution."""

    def __init__(self, size_in: int, size_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        conv = CausalConv3d(size_in, size_out, (3, 3, 3), padding=1, dtype=dtype, rngs=rngs)
        super().__init__({0: ChannelNorm(size_in, axes=3, dtype=dtype), 2: conv})


class AttentionBlock(nnx.Module):
    """Attention with one head among the pixels of each frame, added to the input."""

    def __init__(self, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norm = ChannelNorm(size, axes=2, dtype=dtype)
        self.to_qkv = Conv2d(size, 3 * size, (1, 1), dtype=dtype, rngs=rngs)
        self.proj = Conv2d(size, size, (1, 1), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T H W C"], tails: Tails) -> Float[Array, "B T H W C"]:
        """Map each frame by itself."""
        B, T, H, W, C = x.shape
        dtype = self.to_qkv.weight.dtype
        qkv = self.to_qkv(self.norm(x, dtype=dtype).reshape(B * T, H, W, C))
        q, k, v = jnp.split(qkv.reshape(B * T, H * W, 1, 3 * C), 3, axis=-1)
        seen = ops.attention(q, k, v, causal=False).astype(dtype)
        return x + self.proj(seen.reshape(B * T, H, W, C)).reshape(x.shape)


class Spatial(ByPlace):
    """The convolution of a resampling layer, by its place after the padding or the upsampling."""

    def __call__(self, x: Float[Array, "B T H W C"], scale: int = 1) -> Float[Array, "B T Hout Wout O"]:
        """Resample each frame, one after the other, enlarged `scale` times before."""

        def resample(frame: Array) -> Array:
            return self[1](jnp.repeat(jnp.repeat(frame, scale, axis=1), scale, axis=2))

        return jnp.moveaxis(jax.lax.map(resample, jnp.moveaxis(x, 1, 0)), 0, 1)


class Downsample(nnx.Module):
    """Half the height and width; with `time`, also one frame for each two after the first. Float32 out."""

    def __init__(self, size: int, *, time: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        conv = Conv2d(size, size, (3, 3), stride=2, padding=((0, 1), (0, 1)), dtype=dtype, rngs=rngs)
        self.resample = Spatial({1: conv})
        self.time_conv = CausalConv3d(size, size, (3, 1, 1), stride=(2, 1, 1), dtype=dtype, rngs=rngs) if time else None

    def __call__(self, x: Float[Array, "B T H W C"], tails: Tails) -> Float[Array, "B Tout Hout Wout C"]:
        """Map frames that stand next to those in `tails`."""
        x = self.resample(x)
        if self.time_conv is None:
            return x
        before = tails.before(x, 1)
        if not tails.first:
            return self.time_conv(x, before)
        if x.shape[1] == 1:
            return x
        return jnp.concatenate([x[:, :1], self.time_conv(x[:, 1:], x[:, :1])], axis=1)


class Upsample(nnx.Module):
    """Twice the height and width with other channels; with `time`, also two frames for each after the first."""

    def __init__(self, size: int, size_out: int, *, time: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        self.resample = Spatial({1: Conv2d(size, size_out, (3, 3), padding=1, dtype=dtype, rngs=rngs)})
        self.time_conv = CausalConv3d(size, 2 * size, (3, 1, 1), dtype=dtype, rngs=rngs) if time else None

    def __call__(self, x: Float[Array, "B T H W C"], tails: Tails) -> Float[Array, "B Tout Hout Wout O"]:
        """Map frames that stand next to those in `tails`."""
        if self.time_conv is not None:
            kept = int(tails.first)
            later = x[:, kept:]
            if later.shape[1]:
                # The convolution's two halves are even and odd frames.
                B, T, H, W, C = later.shape
                later = tails.convolve(self.time_conv, later).reshape(B, T, H, W, 2, C)
                later = jnp.moveaxis(later, 4, 2).reshape(B, 2 * T, H, W, C)
            else:
                tails.before(later, self.time_conv.weight.shape[2] - 1)
            x = jnp.concatenate([x[:, :kept], later], axis=1)
        return self.resample(x, scale=2)


class DownBlock(nnx.Module):
    """Residual blocks of one level of the encoder, then half the height and width, and with `time` half the frames.

    Where `time` is None, the last level, the size stays.
    """

    def __init__(self, layers: list[nnx.Module], size_in: int, size_out: int, time: bool | None):
        self.factors = (1, 1) if time is None else (1 + time, 2)
        _check_channels(size_in * self.factors[0] * self.factors[1] ** 2, size_out)
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

    def __init__(self, layers: list[nnx.Module], size_in: int, size_out: int, time: bool | None):
        self.factors = None if time is None else (1 + time, 2)
        if time is not None:
            _check_channels(size_out * (1 + time) * 4, size_in)
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
