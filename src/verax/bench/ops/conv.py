"""Convolutions by themselves, in the shapes of Wan's video VAE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from verax import ops
from verax.bench.harness import Case, implementations, operation_case, random, torch_tensor

__all__ = ["conv_cases"]


def conv_cases(torch: Any = None) -> Iterator[Case]:
    """Cases one by one; with torch's sides, in its two memory layouts, if it is given.

    The decoder's at its highest and its lowest resolution, an upsampler, a downsampler, and a shortcut.
    """
    yield _video((4, 128, 128), 96, 96, torch=torch)
    yield _video((4, 128, 128), 96, 96, torch=torch, cached=False)
    yield _video((4, 128, 128), 96, 96, torch=torch, dtype="float32")
    yield _video((4, 16, 16), 384, 384, torch=torch)
    yield _video((4, 64, 64), 192, 384, torch=torch, kernel=(1, 1, 1))
    yield _image((128, 128), 192, 96, torch=torch, padding=((1, 1), (1, 1)))
    yield _image((128, 128), 96, 96, torch=torch, stride=2, padding=((0, 1), (0, 1)))


def _video(
    size: tuple[int, int, int],
    channels: int,
    out: int,
    *,
    torch: Any,
    kernel: tuple[int, int, int] = (3, 3, 3),
    dtype: str = "bfloat16",
    cached: bool = True,
) -> Case:
    """Frames in the middle of a video, after a cache of earlier ones, or the first, after zeros."""
    frames, before, sides = size[0], kernel[0] - 1, kernel[1] // 2
    x, weight, bias = _arrays((1, *size, channels), (out, channels, *kernel), dtype)
    cache = random((1, before, *size[1:], channels), dtype, 3)
    options = dict(padding=sides, cache=cache) if cached and before else dict(padding=sides)
    # Zeros before the first frame need not be multiplied.
    seen = frames * kernel[0] - (0 if cached else sum(range(kernel[0])))
    torch_sides = {}
    if torch is not None:
        padded = jnp.concatenate([cache if cached else jnp.zeros_like(cache), x], axis=1)
        torch_sides = _torch_sides(torch, torch.nn.functional.conv3d, padded, weight, bias, padding=(0, sides, sides))
    return operation_case(
        "conv3d",
        f"{dtype}, {channels} to {out}, {'x'.join(map(str, kernel))}, {'x'.join(map(str, size))}"
        + ("" if cached else ", first frames"),
        dtype,
        x.nbytes + cached * cache.nbytes + weight.nbytes + x.nbytes // channels * out,
        2 * math.prod(size[1:]) * channels * out * math.prod(kernel[1:]) * seen,
        ops.conv3d.select(x, weight, bias, **options).name,
        {**implementations(ops.conv3d, x, weight, bias, **options), **torch_sides},
    )


def _image(
    size: tuple[int, int],
    channels: int,
    out: int,
    *,
    torch: Any,
    stride: int = 1,
    padding: tuple[tuple[int, int], tuple[int, int]],
    dtype: str = "bfloat16",
) -> Case:
    x, weight, bias = _arrays((1, *size, channels), (out, channels, 3, 3), dtype)
    options = dict(stride=stride, padding=padding)
    pixels = math.prod(size) // stride**2
    torch_sides = {}
    if torch is not None:
        padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))
        torch_sides = _torch_sides(torch, torch.nn.functional.conv2d, padded, weight, bias, stride=stride)
    return operation_case(
        "conv2d",
        f"{dtype}, {channels} to {out}, 3x3, {'x'.join(map(str, size))}" + (f", stride {stride}" if stride > 1 else ""),
        dtype,
        x.nbytes + weight.nbytes + x.itemsize * pixels * out,
        2 * pixels * out * channels * 9,
        ops.conv2d.select(x, weight, bias, **options).name,
        {**implementations(ops.conv2d, x, weight, bias, **options), **torch_sides},
    )


def _arrays(x: tuple[int, ...], weight: tuple[int, ...], dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    return random(x, dtype, 0), random(weight, dtype, 1), random(weight[:1], dtype, 2)


def _torch_sides(
    torch: Any, function: Callable[..., object], x: jax.Array, weight: jax.Array, bias: jax.Array, **options: Any
) -> dict[str, Callable[[], object]]:
    """torch's function on the padded input: channels first, as modules have it by default, and channels last."""
    first = [torch_tensor(torch, array, str(array.dtype)) for array in (jnp.moveaxis(x, -1, 1), weight)]
    layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    last = [array.to(memory_format=layout) for array in first]
    offset = torch_tensor(torch, bias, str(bias.dtype))
    return {
        "torch": lambda: function(*first, offset, **options),
        "torch channels_last": lambda: function(*last, offset, **options),
    }
