"""Convolutions of channels-last images and videos, causal in time, with weights as PyTorch stores them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from verax.errors import InvalidParameterError
from verax.ops._dispatch import Example, check_shapes, float32, operation
from verax.ops.attention import exact_products

Stride = int | Sequence[int]
"""Stride of all axes, or of each."""

Padding = int | Sequence[int | Sequence[int]]
"""Zeros around an image: on all sides; above and below, left and right; or `((top, bottom), (left, right))`."""


class Geometry(TypedDict, total=False):
    """Keyword arguments of both convolutions."""

    stride: Stride
    padding: Padding


def _check(x: Any, weight: Any, bias: Any = None, **_: Any) -> None:
    check_shapes(bias=(bias, weight.shape[:1]))


@operation(check=_check)
def conv3d(
    x: Float[Array, "B T H W C"],
    weight: Float[Array, "O C kt kh kw"],
    bias: Float[Array, "O"] | None = None,
    *,
    stride: Stride = 1,
    padding: Padding = 0,
    cache: Float[Array, "B P H W C"] | None = None,
) -> Float[Array, "B Tout Hout Wout O"]:
    """Convolution of T frames, causal: an output frame sees no later frame than its own. In the dtype of `x`.

    `x` is rounded to the weight's dtype; products and bias are added up in float32. This is the `CausalConv3d` of
    Wan's video VAE (Wan Team, 2025, arXiv:2503.20314).

    Before the first frame stand `kt - 1` frames of zeros, or the frames of `cache` in their place. So a scan over
    chunks of frames is exact if it hands on, as the cache, the last `kt - stride` frames that it has seen. A cache of
    no frames is a convolution without padding in time: `Tout = (P + T - kt) // stride + 1`.

    Args:
        x: frames of height H, width W and C channels.
        weight: kernel of `kt` frames, `kh` rows and `kw` columns.
        bias: added to each output channel.
        stride: in time, height and width.
        padding: zeros around each frame.
        cache: earlier frames, any number P of them.

    Raises:
        InvalidParameterError: for arrays that are not floats, or if shapes do not fit together, or the kernel does not
            fit the padded frames.
    """
    return _convolve(x, weight, bias, cache, jnp.float32, stride=stride, padding=padding)


@operation(check=_check)
def conv2d(
    x: Float[Array, "B H W C"],
    weight: Float[Array, "O C kh kw"],
    bias: Float[Array, "O"] | None = None,
    *,
    stride: Stride = 1,
    padding: Padding = 0,
) -> Float[Array, "B Hout Wout O"]:
    """Convolution of images, in the dtype of `x`.

    `x` is rounded to the weight's dtype; products and bias are added up in float32.

    Args:
        x: images of height H, width W and C channels.
        weight: kernel of `kh` rows and `kw` columns.
        bias: added to each output channel.
        stride: in height and width.
        padding: zeros around each image; `((0, 1), (0, 1))` with stride 2 is the downsampling of Wan's video VAE.

    Raises:
        InvalidParameterError: for arrays that are not floats, or if shapes do not fit together, or the kernel does not
            fit the padded image.
    """
    return _convolve(x, weight, bias, None, jnp.float32, stride=stride, padding=padding)


conv3d.examples = [Example((float32(1, 4, 32, 32, 96), float32(96, 96, 3, 3, 3)), {"padding": 1})]

conv2d.examples = [Example((float32(1, 32, 32, 96), float32(96, 96, 3, 3)), {"padding": 1})]


def _is_bfloat16(x: Any, weight: Any, *_: Any, **__: Any) -> bool:
    return weight.dtype == jnp.bfloat16


# cuDNN and TPUs accumulate in float32, but give the sum in the dtype of what they multiply.
@conv3d.implementation("bfloat16", platforms=("gpu", "tpu"), accepts=_is_bfloat16)
def _conv3d_bfloat16(
    x: Float[Array, "B T H W C"],
    weight: Float[Array, "O C kt kh kw"],
    bias: Float[Array, "O"] | None = None,
    *,
    cache: Float[Array, "B P H W C"] | None = None,
    **geometry: Unpack[Geometry],
) -> Float[Array, "B Tout Hout Wout O"]:
    return _convolve(x, weight, bias, cache, jnp.bfloat16, **geometry)


@conv2d.implementation("bfloat16", platforms=("gpu", "tpu"), accepts=_is_bfloat16)
def _conv2d_bfloat16(
    x: Float[Array, "B H W C"],
    weight: Float[Array, "O C kh kw"],
    bias: Float[Array, "O"] | None = None,
    **geometry: Unpack[Geometry],
) -> Float[Array, "B Hout Wout O"]:
    return _convolve(x, weight, bias, None, jnp.bfloat16, **geometry)


class ConvShape:
    """Geometry of a convolution by axis: time (for videos), height, width."""

    def __init__(
        self,
        x: Sequence[int],
        weight: Sequence[int],
        stride: Stride = 1,
        padding: Padding = 0,
        cache: Sequence[int] | None = None,
    ):
        axes = ("time", "height", "width")[-len(weight[2:]) :]
        if len(axes) != len(weight) - 2 or len(x) != len(weight):
            raise InvalidParameterError(f"weight: its shape {list(weight)} does not fit an x of shape {list(x)}")
        if x[-1] != weight[1]:
            raise InvalidParameterError(f"weight: takes {weight[1]} channels, but x has {x[-1]}")
        self.stride = _each(stride, len(axes))
        if len(self.stride) != len(axes) or not all(_is_count(s, 1) for s in self.stride):
            raise InvalidParameterError(f"stride: expected at least 1, one number or {len(axes)}, got {stride}")
        extents = list(x[1:-1])
        self.sides = _sides(padding)
        if len(axes) == 3:
            if cache is not None and (cache[0], *cache[2:]) != (x[0], *x[2:]):
                raise InvalidParameterError(f"cache: expected frames of the shape of x, {tuple(x)}, got {tuple(cache)}")
            self.sides = ((weight[2] - 1 if cache is None else 0, 0), *self.sides)
            extents[0] += 0 if cache is None else cache[1]
        padded = [extent + sum(sides) for extent, sides in zip(extents, self.sides, strict=True)]
        for axis, extent, size in zip(axes, padded, weight[2:], strict=True):
            if size > extent:
                raise InvalidParameterError(
                    f"weight: its kernel of {size} in {axis} does not fit into {extent}, padded"
                )
        self.out = tuple((n - k) // s + 1 for n, k, s in zip(padded, weight[2:], self.stride, strict=True))


def _each(value: Any, count: int) -> tuple[Any, ...]:
    """A number for each of `count` places, or numbers unchanged."""
    return (value,) * count if isinstance(value, Real) else tuple(value)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= least)


def _sides(padding: Padding) -> tuple[tuple[int, int], ...]:
    """`((top, bottom), (left, right))`."""
    sides = tuple(_each(axis, 2) for axis in _each(padding, 2))
    if len(sides) != 2 or any(len(pair) != 2 or not all(_is_count(side, 0) for side in pair) for pair in sides):
        raise InvalidParameterError(
            "padding: expected a number, (height, width) or ((top, bottom), (left, right)), none negative, "
            f"got {padding}"
        )
    return tuple((before, after) for before, after in sides)


def _convolve(
    x: Array, weight: Array, bias: Array | None, cache: Array | None, products: Any, **geometry: Unpack[Geometry]
) -> Array:
    shape = ConvShape(x.shape, weight.shape, cache=None if cache is None else cache.shape, **geometry)
    for name, array in (("x", x), ("weight", weight)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise InvalidParameterError(f"{name}: expected floats, got {array.dtype}")
    if cache is not None:
        x = jnp.concatenate([cache.astype(x.dtype), x], axis=1)
    axes = "THW"[-len(shape.stride) :]
    y = jax.lax.conv_general_dilated(
        x.astype(weight.dtype).astype(products),
        weight.astype(products),
        shape.stride,
        shape.sides,
        dimension_numbers=(f"N{axes}C", f"OI{axes}", f"N{axes}C"),
        precision=exact_products(weight),
    ).astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
