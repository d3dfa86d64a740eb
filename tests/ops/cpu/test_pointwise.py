"""The native norms and GELU at every level, against float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from verax import ops
from verax.ops.cpu import library

pytestmark = needs_library


@jax.jit
def native_norm(x, weight):
    with ops.use_implementations(rms_norm="native"):
        return ops.rms_norm(x, weight, 1e-6)


def arrays(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[:-1]) * 4)[..., None]
    return jnp.asarray(x, jnp.float32), jnp.asarray(rng.standard_normal(shape[-1]), dtype)


@for_each_level
@pytest.mark.parametrize("shape", [(3, 1), (1, 7), (5, 64), (2, 3, 129), (0, 8), (70, 1024)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_shape_is_exact_to_rounding(level, shape, dtype):
    x, weight = arrays(shape, dtype)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt(np.mean(wide * wide, -1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
    with library.use_level(level):
        np.testing.assert_allclose(native_norm(x, weight), exact, rtol=2e-6, atol=1e-7)


@for_each_level
def test_zeros_nan_and_infinity_stay_in_their_rows(level):
    x, weight = arrays((4, 100), jnp.float32)
    x = x.at[0].set(0).at[1, 99].set(jnp.nan).at[2, 5].set(jnp.inf)
    with library.use_level(level):
        y = np.asarray(native_norm(x, weight))
    reference = np.asarray(ops.rms_norm.reference(x, weight, 1e-6))
    assert (y[0] == 0).all()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(reference))
    np.testing.assert_allclose(y[3], reference[3], rtol=1e-6)


def test_a_norm_can_be_mapped_and_differentiated():
    x, weight = arrays((3, 40), jnp.float32)
    slopes = {}
    for implementation in ("native", "reference"):
        with ops.use_implementations(rms_norm=implementation):
            slopes[implementation] = jax.grad(lambda x, w: jnp.sum(ops.rms_norm(x, w, 1e-6) ** 3), (0, 1))(x, weight)
    with ops.use_implementations(rms_norm="native"):
        np.testing.assert_array_equal(jax.vmap(lambda row: ops.rms_norm(row, weight, 1e-6))(x), native_norm(x, weight))
    for ours, theirs in zip(slopes["native"], slopes["reference"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@jax.jit
def native_layer(x, weight, bias, residual=None):
    with ops.use_implementations(layer_norm="native"):
        return ops.layer_norm(x, weight, bias, 1e-6, residual)


def layer_arrays(shape, dtype):
    rng = np.random.default_rng(1)
    x, residual = (jnp.asarray(rng.standard_normal(shape) * 3 + 5, jnp.float32) for _ in range(2))
    weight, bias = (jnp.asarray(rng.standard_normal(shape[-1]), dtype) for _ in range(2))
    return x, weight, bias, residual


@for_each_level
@pytest.mark.parametrize("shape", [(3, 1), (1, 7), (5, 64), (2, 3, 129), (0, 8), (70, 1024)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("with_residual", [True, False])
def test_every_shape_of_a_layer_norm_is_exact_to_rounding(level, shape, dtype, with_residual):
    x, weight, bias, residual = layer_arrays(shape, dtype)
    wide = np.asarray(x + residual if with_residual else x, np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    exact = centred / np.sqrt(np.mean(centred * centred, -1, keepdims=True) + 1e-6)
    exact = exact * np.asarray(weight, np.float64) + np.asarray(bias, np.float64)
    with library.use_level(level):
        result = native_layer(x, weight, bias, residual if with_residual else None)
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=5e-6)


@for_each_level
def test_nan_and_infinity_stay_in_their_rows_of_a_layer_norm(level):
    x, weight, bias, residual = layer_arrays((4, 100), jnp.float32)
    x, residual = x.at[1, 99].set(jnp.nan), residual.at[2, 5].set(jnp.inf)
    with library.use_level(level):
        y = np.asarray(native_layer(x, weight, bias, residual))
    np.testing.assert_array_equal(np.isnan(y).all(axis=1), [False, True, True, False])
    np.testing.assert_allclose(y[3], ops.layer_norm.reference(x, weight, bias, 1e-6, residual)[3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_residual", [True, False])
def test_a_layer_norm_can_be_mapped_and_differentiated(with_residual):
    *arrays, residual = layer_arrays((3, 40), jnp.float32)
    arrays = [*arrays, residual] if with_residual else arrays

    def total(*arrays):
        return jnp.sum(ops.layer_norm(*arrays[:3], 1e-6, *arrays[3:]) ** 3)

    slopes = {}
    for implementation in ("native", "reference"):
        with ops.use_implementations(layer_norm=implementation):
            slopes[implementation] = jax.grad(total, tuple(range(len(arrays))))(*arrays)
    for ours, theirs in zip(slopes["native"], slopes["reference"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    with ops.use_implementations(layer_norm="native"):
        mapped = jax.vmap(lambda row: ops.layer_norm(row, arrays[1], arrays[2], 1e-6))(arrays[0])
    np.testing.assert_array_equal(mapped, native_layer(*arrays[:3]))


@jax.jit
def native_gelu(x):
    with ops.use_implementations(gelu="native"):
        return ops.gelu(x)


@for_each_level
@pytest.mark.parametrize("shape", [(20_001,), (3, 7), (0, 8), (2, 40_000)])
def test_gelu_equals_its_definition(level, shape):
    x = np.linspace(-12, 12, math.prod(shape), dtype=np.float32).reshape(shape)
    exact = [value / 2 * (1 + math.erf(value / math.sqrt(2))) for value in x.reshape(-1).tolist()]
    with library.use_level(level):
        np.testing.assert_allclose(native_gelu(jnp.asarray(x)).reshape(-1), exact, rtol=2e-7, atol=3e-7)


@for_each_level
def test_small_negative_results_keep_their_digits(level):
    x = np.linspace(-5, -1e-30, 1001, dtype=np.float32)
    exact = [value / 2 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()]
    with library.use_level(level):
        np.testing.assert_allclose(native_gelu(jnp.asarray(x)), exact, rtol=3e-5)


@for_each_level
def test_infinity_and_nan(level):
    x = jnp.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 0])
    with library.use_level(level):
        np.testing.assert_array_equal(native_gelu(x), [np.inf, 0, np.nan, np.float32(3e38), 0, 0])


def test_gelu_can_be_mapped_and_differentiated():
    x = jnp.linspace(-3, 3, 60).reshape(3, 20)
    with ops.use_implementations(gelu="native"):
        np.testing.assert_array_equal(jax.vmap(ops.gelu)(x), native_gelu(x))
        slopes = jax.grad(lambda x: jnp.sum(ops.gelu(x) ** 2))(x)
    np.testing.assert_allclose(slopes, jax.grad(lambda x: jnp.sum(ops.gelu.reference(x) ** 2))(x), rtol=1e-5, atol=1e-6)
