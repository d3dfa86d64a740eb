"""C++ kernels of `ops.conv3d` and `ops.conv2d`: patches are multiplied where they lie, frames of zeros skipped.

Kernels of 3 x 3 without a stride in space are convolved by minimal filtering (Winograd; Lavin and Gray, 2016,
arXiv:1509.09308). Where the weight is bfloat16, tiles of 4 x 4 pixels take a quarter of the products. In float32, tiles
of 2 x 2 take four ninths. With 3 frames and no stride in time, two output frames together take two thirds of that. A
value that is not finite reaches all pixels of its tiles, but no earlier frame. In chunks of a clip, a frame has the
bits of the whole if the chunks after the first have an even number of frames. With others, sums are rounded in another
order. With AMX and a bfloat16 weight, tiles of 16 pixels are multiplied directly, which takes less time.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import numpy as np
from jaxtyping import Array, Float

from verax.ops._dispatch import differentiated_as
from verax.ops.conv import ConvShape, Geometry, conv2d, conv3d
from verax.ops.cpu import library
from verax.ops.cpu.attention import FLOATS


def _accepts(x: Any, weight: Any, *_: Any, **__: Any) -> bool:
    dtypes = x.dtype in FLOATS and weight.dtype in FLOATS
    return dtypes and math.prod(weight.shape) > 0


def _convolve(x: Array, weight: Array, bias: Array | None, cache: Array | None, shape: ConvShape) -> Array:
    def kernel(x: Array, weight: Array, bias: Array | None, cache: Array | None) -> Array:
        return library.call(
            "verax_conv",
            (x.shape[0], *shape.out, weight.shape[0]),
            x,
            x[:, :0] if cache is None else cache.astype(x.dtype),
            weight,
            library.optional(bias),
            dtype=x.dtype,
            stride=np.asarray(shape.stride, np.int64),
            before=np.asarray([zeros for zeros, _ in shape.sides], np.int64),
        )

    def reference(x: Array, weight: Array, bias: Array | None, cache: Array | None) -> Array:
        return conv3d.reference(x, weight, bias, stride=shape.stride, padding=shape.sides[-2:], cache=cache)

    return differentiated_as(reference, kernel, x, weight, bias, cache)


@conv3d.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _conv3d_native(
    x: Float[Array, "B T H W C"],
    weight: Float[Array, "O C kt kh kw"],
    bias: Float[Array, "O"] | None = None,
    *,
    cache: Float[Array, "B P H W C"] | None = None,
    **geometry: Unpack[Geometry],
) -> Float[Array, "B Tout Hout Wout O"]:
    shape = ConvShape(x.shape, weight.shape, cache=None if cache is None else cache.shape, **geometry)
    return _convolve(x, weight, bias, cache, shape)


@conv2d.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _conv2d_native(
    x: Float[Array, "B H W C"],
    weight: Float[Array, "O C kh kw"],
    bias: Float[Array, "O"] | None = None,
    **geometry: Unpack[Geometry],
) -> Float[Array, "B Hout Wout O"]:
    # One frame, with a kernel of one frame: no zeros stand before it.
    shape = ConvShape(x.shape, weight.shape, **geometry)
    frames = ConvShape(x[:, None].shape, weight[:, :, None].shape, (1, *shape.stride), shape.sides)
    return _convolve(x[:, None], weight[:, :, None], bias, None, frames)[:, 0]
