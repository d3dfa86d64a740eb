"""The native products of weights in block formats at every level, against float64."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from tests.support.gguf import random_blocks
from verax import ops
from verax.ops.block_quantized import BLOCK_KINDS
from verax.ops.cpu import library

pytestmark = needs_library

KINDS = list(BLOCK_KINDS)


def quantized(kind, n, k, **options):
    weight = ops.BlockQuantizedWeight.from_blocks(kind, random_blocks(kind, n, k, **options))
    return jax.tree.map(jnp.asarray, weight)


def inputs(m, k, seed=1):
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)


def taken(x):
    """x in float64 as the kernels take it: integers of 8 bits with a scale for each 32."""
    parts = x.reshape(len(x), -1, 32)
    scale = np.abs(parts).max(axis=2, keepdims=True) / np.float32(127)
    factor = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 1e-37)
    return (np.rint(parts * factor) * scale.astype(np.float64)).reshape(x.shape)


@jax.jit
def native_each(xs, w):
    """Products of inputs of several sizes in one program: a program takes longer to compile than to run."""
    with ops.use_implementations(linear="native"):
        return [ops.linear(x, w) for x in xs]


def native(x, w):
    return np.asarray(native_each([x], w)[0])


dequantize = jax.jit(lambda weight: weight.dequantize())

LENGTHS = {False: (32, 96, 640, 2048), True: (256, 768, 2304)}
"""Inputs by whether they come in super-blocks: less than a unit, several segments, odd numbers of units."""


@lru_cache(maxsize=1)
def products(kind):
    """Inputs, a weight, their exact product and its size, in every shape: one test of each level after the other."""
    made = []
    for k in LENGTHS[BLOCK_KINDS[kind].super_blocks]:
        for n in (1, 16, 37, 129) if k < 1000 else (37,):
            x, w = inputs(33, k), quantized(kind, n, k)
            weights = np.asarray(dequantize(w), np.float64)
            made.append((x, w, taken(x) @ weights.T, np.abs(x) @ np.abs(weights).T))
    return made


@for_each_level
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_is_exact_to_rounding(level, kind):
    sizes = (0, 1, 2, 3, 4, 5, 7, 8, 9, 33)
    for x, w, exact, size in products(kind):
        with library.use_level(level):
            outputs = native_each([x[:m] for m in sizes], w)
        for m, y in zip(sizes, outputs, strict=True):
            assert np.all(np.abs(y - exact[:m]) <= 1e-5 * size[:m]), (x.shape, exact.shape, m)


@for_each_level
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(level, kind):
    x, w = inputs(17, 768), quantized(kind, 129, 768)
    with library.use_level(level):
        whole = native(x, w)
        for m, y in enumerate(native_each([x[:m] for m in range(1, 17)], w), start=1):
            np.testing.assert_array_equal(y, whole[:m])


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_that_of_inputs_in_eight_bits(kind):
    # An input is off by half a step of its group's peak over 127 at most, which is as good as independent.
    x, w = inputs(8, 2048), quantized(kind, 64, 2048)
    weights = np.asarray(dequantize(w), np.float64)
    step = np.abs(x.reshape(8, -1, 32)).max(axis=2).repeat(32, axis=1) / 127
    deviation = np.sqrt((step**2 / 12) @ (weights**2).T)
    error = np.abs(native(x, w) - x @ weights.T)
    assert np.all(error <= 6 * deviation)
    assert np.sqrt(np.mean((error / deviation) ** 2)) < 1.2


@for_each_level
@pytest.mark.parametrize("size", [0, 1e-42, 1e-36, 1e-20, 1e30])
def test_inputs_of_any_size_are_taken(level, size):
    x = size * inputs(3, 512)
    x[0], x[1, 7] = 0, 300 * x[1, 7]  # a row of nothing, a row with an outlier
    w = quantized("Q4_K", 33, 512)
    with library.use_level(level):
        y = native(x, w)
    exact = x.astype(np.float64) @ np.asarray(dequantize(w), np.float64).T
    np.testing.assert_array_equal(y[0], 0)
    assert np.max(np.abs(y - exact) / np.maximum(np.abs(exact).max(axis=1, keepdims=True), 1e-30)) < 0.1


@for_each_level
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_integers_do_not_overflow(level, kind):
    scales = np.float16([1])
    w = quantized(kind, 16, 512, scales=scales)
    x = np.ones((4, 512), np.float32)
    with library.use_level(level):
        for sign in (1, -1):
            words = w.words.at[:, :, : BLOCK_KINDS[kind].parts[0]].set(0xFFFFFFFF)
            full = ops.BlockQuantizedWeight(words, *w.shape, kind)
            exact = sign * np.asarray(dequantize(full), np.float64).sum(axis=1)
            size = np.abs(np.asarray(dequantize(full))).sum(axis=1)
            assert np.all(np.abs(native(sign * x, full) - exact) <= 1e-4 * size)


@for_each_level
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_with_a_nan_or_infinity_is_nan_and_leaves_the_others_alone(level, kind, value):
    x, w = inputs(3, 512), quantized(kind, 9, 512)
    spoilt = x.copy()
    spoilt[1, 511] = value
    with library.use_level(level):
        alone, y = native(x, w), native(spoilt, w)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[::2], alone[::2])


@for_each_level
def test_several_kinds_in_one_call_give_what_each_gives_alone(level):
    kinds = ("Q4_K", "Q6_K", "Q8_0", "Q5_0")  # queries, keys and values of a file are often of two kinds
    weights = [quantized(kind, n, 256) for kind, n in zip(kinds, (300, 1, 17, 48), strict=True)]
    biases = [None, jnp.ones(1), None, jnp.arange(48.0)]
    for m in (0, 1, 3):
        x = jnp.asarray(inputs(m, 256))
        assert ops.multi_linear.select(x, weights).name == "native"
        with library.use_level(level):
            for y, w, bias in zip(ops.multi_linear(x, weights, biases), weights, biases, strict=True):
                np.testing.assert_array_equal(y, native(x, w) if bias is None else native(x, w) + bias)


def test_it_can_be_mapped_and_differentiated():
    x, w = jnp.asarray(inputs(3, 256)), quantized("Q5_K", 10, 256)
    with ops.use_implementations(linear="native"):
        many = jax.vmap(ops.linear, (0, None))(jnp.stack([x, 2 * x]), w)
        slope = jax.grad(lambda x: jnp.sum(ops.linear(x, w) * jnp.arange(10.0)))(x)
    with ops.use_implementations(linear="reference"):
        expected = jax.grad(lambda x: jnp.sum(ops.linear(x, w) * jnp.arange(10.0)))(x)
    np.testing.assert_array_equal(many[1], 2 * many[0])
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-4)


def test_few_rows_run_natively_and_many_do_not():
    w = quantized("Q4_K", 64, 256)
    assert ops.linear.select(jnp.ones((1, 256)), w).name == "native"
    assert ops.linear.select(jnp.ones((4, 8, 256)), w).name == "native"
    assert ops.linear.select(jnp.ones((512, 256)), w).name != "native"
