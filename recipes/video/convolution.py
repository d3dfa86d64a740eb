"""Convolutions whose gradients are convolutions too, so that fast implementations run all three.

XLA's own gradients of a convolution with few channels are ten times slower on a CPU. The gradient to the input is a
convolution of the incoming gradient with the kernel turned round. The gradient to the kernel is a convolution of the
input, with channels in the place of examples, by the incoming gradient. Operands are rounded to the weight's dtype.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from verax import ops
from verax.ops.conv import ConvShape, Padding, Stride

Sides = tuple[tuple[int, int], ...]


def _convolve_fast(x: Array, weight: Array, stride: tuple[int, ...] = (1, 1, 1)) -> Array:
    """Convolution without padding, in the dtype of `x`, with float32 sums: the preferred one of GPUs rounds them."""
    on_cpu = ops.target().platform == "cpu"
    convolve = ops.conv3d.restricted() if on_cpu else ops.conv3d.implementations["reference"].function
    return convolve(x, weight, stride=stride, cache=x[:, :0])


def _spread(x: Array, low: tuple[int, ...], high: tuple[int, ...], between: tuple[int, ...]) -> Array:
    """Zeros around (cut off where negative) and between the elements of time, height and width."""
    edges = [(0, 0, 0), *zip(low, high, between, strict=True), (0, 0, 0)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), edges)


def _padded(x: Array, sides: Sides) -> Array:
    return _spread(x, tuple(low for low, _ in sides), tuple(high for _, high in sides), (0, 0, 0))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(x: Array, weight: Array, stride: tuple[int, ...], sides: Sides) -> Array:
    return _convolve_fast(_padded(x, sides), weight, stride)


def _forward(x: Array, weight: Array, stride: tuple[int, ...], sides: Sides) -> tuple[Array, tuple[Array, Array]]:
    return _convolve(x, weight, stride, sides), (x.astype(weight.dtype), weight)


def _backward(
    stride: tuple[int, ...], sides: Sides, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, weight = saved
    kernel = weight.shape[2:]
    between = tuple(s - 1 for s in stride)
    dtype = gradient.dtype

    low = tuple(k - 1 - before for k, (before, _) in zip(kernel, sides, strict=True))
    spread = [(n - 1) * s + 1 for n, s in zip(gradient.shape[1:4], stride, strict=True)]
    high = tuple(n + k - 1 - a - m for n, k, a, m in zip(x.shape[1:4], kernel, low, spread, strict=True))
    turned = jnp.swapaxes(jnp.flip(weight, (2, 3, 4)), 0, 1)
    to_x = _convolve_fast(_spread(gradient, low, high, between), turned).astype(dtype)

    padded = jnp.moveaxis(_padded(x, sides), 0, -1)  # [T, H, W, C, B]
    channels_first = jnp.moveaxis(padded, 3, 0).astype(jnp.float32)
    by = jnp.moveaxis(_spread(gradient.astype(weight.dtype), (0,) * 3, (0,) * 3, between), -1, 0)  # [O, B, T, H, W]
    to_weight = jnp.moveaxis(_convolve_fast(channels_first, by), -1, 0)
    kt, kh, kw = kernel  # a stride may leave more at the end than the kernel has seen
    return to_x, to_weight[:, :, :kt, :kh, :kw].astype(weight.dtype)


_convolve.defvjp(_forward, _backward)


def own_gradient_conv3d(
    x: Float[Array, "B T H W C"],
    weight: Float[Array, "O C kt kh kw"],
    bias: Float[Array, "O"] | None = None,
    *,
    stride: Stride = 1,
    padding: Padding = 0,
    cache: Float[Array, "B P H W C"] | None = None,
) -> Float[Array, "B Tout Hout Wout O"]:
    """`ops.conv3d` with gradients that are convolutions, for `ops.use_implementations`."""
    if cache is None and x.shape[1] == 1:
        weight = weight[:, :, -1:]  # what stands before a single frame is zeros
    shape = ConvShape(x.shape, weight.shape, stride, padding, None if cache is None else cache.shape)
    if cache is not None:
        x = jnp.concatenate([cache.astype(x.dtype), x], axis=1)
    y: Array = _convolve(x, weight, tuple(shape.stride), tuple(shape.sides))
    return y if bias is None else (y + bias.astype(jnp.float32)).astype(x.dtype)


def own_gradient_conv2d(
    x: Float[Array, "B H W C"],
    weight: Float[Array, "O C kh kw"],
    bias: Float[Array, "O"] | None = None,
    *,
    stride: Stride = 1,
    padding: Padding = 0,
) -> Float[Array, "B Hout Wout O"]:
    """`ops.conv2d` with gradients that are convolutions, for `ops.use_implementations`."""
    shape = ConvShape(x.shape, weight.shape, stride, padding)
    y: Array = _convolve(x[:, None], weight[:, :, None], (1, *shape.stride), ((0, 0), *shape.sides))
    y = y[:, 0]
    return y if bias is None else (y + bias.astype(jnp.float32)).astype(x.dtype)
