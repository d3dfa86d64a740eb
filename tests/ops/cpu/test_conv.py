"""The C++ convolution at every level where it differs from others: minimal filtering, bits of parts, memory.

Its values are tested with other implementations' in tests/ops/test_conv.py.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.test_conv import ONES, arguments, each_dtype
from tests.support.conv import conv_arrays, exact_conv3d
from tests.support.cpu import for_each_level, needs_library
from verax import ops
from verax.ops.cpu import library

pytestmark = needs_library

native, native2d = (
    jax.jit(operation.implementations["native"].function, static_argnames=("stride", "padding"))
    for operation in (ops.conv3d, ops.conv2d)
)
reference = ops.conv3d.reference

MINIMAL_FILTERING = {
    "whole tiles": dict(x=(1, 2, 16, 20, 32), kernel=(3, 3, 3), out=48, padding=ONES),
    "parts of tiles": dict(x=(2, 3, 18, 15, 41), kernel=(3, 3, 3), out=33, padding=ONES),
    "many blocks": dict(x=(1, 6, 19, 50, 64), kernel=(3, 3, 3), out=100, padding=((0, 3), (2, 0))),
    "images": dict(x=(3, 1, 21, 16, 200), kernel=(1, 3, 3), out=64, padding=ONES),
    "deep pairs": dict(x=(1, 2, 16, 16, 160), kernel=(3, 3, 3), out=33, padding=ONES),
    "stride in time": dict(x=(1, 7, 16, 16, 16), kernel=(2, 3, 3), out=32, stride=(2, 1, 1)),
}


@lru_cache(maxsize=1)
def minimal_filtering(dtype):
    """Arguments, options and exact results of each case, with and without a cache: one test of each level in turn."""
    problems = []
    for case in MINIMAL_FILTERING.values():
        arrays, options = arguments(case, dtype)
        for cache in (None, arrays[0][:, :1] - 0.5 * arrays[0][:, -1:]):
            given = options | {"cache": cache}
            problems.append((arrays, given, exact_conv3d(*arrays, **given)))
    return problems


@for_each_level
@each_dtype
def test_kernels_of_3x3_are_as_exact_with_fewer_products(level, dtype):
    # The result is float32, so that its error comes from the sums: XLA's is 3e-7, and direct sums' one by one 9e-7.
    bound = {jnp.float32: 6e-7, jnp.bfloat16: 2e-6}[dtype]
    with library.use_level(level):
        for (x, weight, bias), options, exact in minimal_filtering(dtype):
            y = native(x.astype(jnp.float32), weight, bias, **options)
            assert np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2)) < bound
            rounded = native(x.astype(jnp.bfloat16), weight, bias, **options)
            assert rounded.dtype == jnp.bfloat16
            if dtype == jnp.bfloat16:
                np.testing.assert_array_equal(rounded, y.astype(jnp.bfloat16))


@for_each_level
@each_dtype
@pytest.mark.parametrize("out", [20, 50])  # the direct kernel, minimal filtering
def test_chunks_of_frames_have_the_bits_of_the_whole(level, dtype, out):
    x, weight, bias = conv_arrays((2, 5, 20, 40, 24), (3, 3, 3), out, dtype=dtype)
    with library.use_level(level):
        whole = np.asarray(native(x, weight, bias, padding=1).astype(jnp.float32))
        zeros = jnp.zeros((2, 2, 20, 40, 24), dtype)
        chunks = [
            native(x[:, :1], weight, bias, padding=1, cache=zeros),
            native(x[:, 1:3], weight, bias, padding=1, cache=jnp.concatenate([zeros[:, :1], x[:, :1]], 1)),
            native(x[:, 3:], weight, bias, padding=1, cache=x[:, 1:3]),
        ]
        np.testing.assert_array_equal(jnp.concatenate(chunks, 1).astype(jnp.float32), whole)


@for_each_level
@each_dtype
def test_parts_of_images_have_the_bits_of_the_whole(level, dtype):
    x, weight, bias = conv_arrays((2, 5, 20, 40, 24), (3, 3, 3), 50, dtype=dtype)
    with library.use_level(level):
        whole = np.asarray(native(x, weight, bias, padding=1).astype(jnp.float32))
        # A part with one row and column of its neighbours around it, and of the same whole tiles.
        part = native(x[:, :, 3:17, 3:29], weight, bias)
        np.testing.assert_array_equal(part.astype(jnp.float32), whole[:, :, 4:16, 4:28])
        x, weight, bias = x[..., :6], weight[:20, :6], bias[:20]  # direct sums, which have no tiles
        whole = np.asarray(native(x, weight, bias, padding=1).astype(jnp.float32))
        part = native(x[:, :, 6:17, 4:30], weight, bias)
        np.testing.assert_array_equal(part.astype(jnp.float32), whole[:, :, 7:16, 5:29])


@for_each_level
@each_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_the_pixels_that_see_them(level, dtype, value):
    x, weight, bias = conv_arrays((1, 3, 8, 9, 6), (3, 3, 3), 20, dtype=dtype)
    x = x.at[0, 1, 0, 8, 2].set(value)
    with library.use_level(level):
        y = native(x, weight, bias, padding=1).astype(jnp.float32)
    expected = np.asarray(reference(x, weight, bias, padding=1).astype(jnp.float32))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_allclose(y, expected, atol=2e-2 if dtype == jnp.bfloat16 else 2e-5)


def test_no_images():
    x, weight, bias = conv_arrays((0, 2, 4, 4, 8), (3, 3, 3), 6)
    assert native(x, weight, bias, padding=1).shape == (0, 2, 4, 4, 6)
    assert native2d(x[:, 0], weight[:, :, 0]).shape == (0, 2, 2, 6)


def test_derivatives_are_the_references():
    x, weight, bias = conv_arrays((1, 3, 5, 6, 4), (3, 3, 3), 5)
    cache = jnp.ones((1, 2, 5, 6, 4))

    def loss(x, weight, bias, cache):
        return jnp.sum(jnp.sin(ops.conv3d(x, weight, bias, padding=1, stride=(1, 2, 1), cache=cache)))

    gradients = {}
    for implementation in ("native", "reference"):
        with ops.use_implementations(conv3d=implementation):
            gradients[implementation] = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, weight, bias, cache)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *gradients.values())


def test_it_can_be_mapped():
    x, weight, bias = conv_arrays((3, 2, 4, 5, 8), (3, 3, 3), 6)
    with ops.use_implementations(conv3d="native"):
        mapped = jax.vmap(lambda x: ops.conv3d(x[None], weight, bias, padding=1)[0])(x)
    np.testing.assert_array_equal(mapped, native(x, weight, bias, padding=1))


def test_it_is_chosen_for_the_dtypes_that_it_reads():
    x, weight, bias = conv_arrays((1, 2, 4, 4, 8), (3, 3, 3), 6)
    assert ops.conv3d.select(x, weight, bias).name == "native"
    assert ops.conv3d.select(x, weight.astype(jnp.bfloat16)).name == "native"
    assert ops.conv3d.select(x.astype(jnp.float16), weight.astype(jnp.float16)).name == "reference"
    assert ops.conv2d.select(x[:, 0], weight[:, :, 0]).name == "native"


def test_a_convolution_takes_the_memory_of_its_result():
    # A matrix of patches would take 27 times the input's 3 MB.
    x, weight = (
        jax.ShapeDtypeStruct((1, 4, 64, 64, 96), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 96, 3, 3, 3), jnp.bfloat16),
    )
    assert native.lower(x, weight, padding=1).compile().memory_analysis().temp_size_in_bytes < 2**20
