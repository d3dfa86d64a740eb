"""Definition of a convolution in float64, and its test inputs."""

import jax.numpy as jnp
import numpy as np

from tests.support.attention import float64


def exact_conv3d(x, weight, bias=None, *, stride=(1, 1, 1), padding=((0, 0), (0, 0)), cache=None):
    """Convolution as a sum over the taps of the kernel, in float64. Taps on padding add nothing."""
    x, weight = float64(x), float64(weight)
    kt, kh, kw = weight.shape[2:]
    before = np.zeros((x.shape[0], kt - 1, *x.shape[2:])) if cache is None else float64(cache)
    x = np.pad(np.concatenate([before, x], 1), ((0, 0), (0, 0), *padding, (0, 0)))
    out = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:4], (kt, kh, kw), stride, strict=True)]
    y = np.zeros((x.shape[0], *out, weight.shape[0])) + (0 if bias is None else float64(bias))
    for t, h, w in np.ndindex(kt, kh, kw):
        taps = x[:, t :: stride[0], h :: stride[1], w :: stride[2]][:, : out[0], : out[1], : out[2]]
        y += np.einsum("bthwc,oc->bthwo", taps, weight[:, :, t, h, w])
    return y


def conv_arrays(x_shape, kernel, out, *, dtype=jnp.float32, weight_dtype=None, seed=0):
    """Inputs x, weight and bias, with the weight scaled so that results are of the order of 1."""
    rng = np.random.default_rng(seed)
    fan_in = x_shape[-1] * np.prod(kernel)
    return (
        jnp.asarray(rng.standard_normal(x_shape), dtype),
        jnp.asarray(rng.standard_normal((out, x_shape[-1], *kernel)) / np.sqrt(max(1, fan_in)), weight_dtype or dtype),
        jnp.asarray(rng.standard_normal(out), weight_dtype or dtype),
    )
