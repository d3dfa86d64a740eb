"""The native GELU at every level, against float64."""

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
def native(x):
    with ops.use_implementations(gelu="native"):
        return ops.gelu(x)


@for_each_level
@pytest.mark.parametrize("shape", [(20_001,), (3, 7), (0, 8), (2, 40_000)])
def test_values_are_those_of_the_definition(level, shape):
    x = np.linspace(-12, 12, math.prod(shape), dtype=np.float32).reshape(shape)
    exact = [value / 2 * (1 + math.erf(value / math.sqrt(2))) for value in x.reshape(-1).tolist()]
    with library.use_level(level):
        np.testing.assert_allclose(native(jnp.asarray(x)).reshape(-1), exact, rtol=2e-7, atol=3e-7)


@for_each_level
def test_small_negative_results_keep_their_digits(level):
    x = np.linspace(-5, -1e-30, 1001, dtype=np.float32)
    exact = [value / 2 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()]
    with library.use_level(level):
        np.testing.assert_allclose(native(jnp.asarray(x)), exact, rtol=3e-5)


@for_each_level
def test_infinity_and_nan(level):
    x = jnp.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 0])
    with library.use_level(level):
        np.testing.assert_array_equal(native(x), [np.inf, 0, np.nan, np.float32(3e38), 0, 0])


def test_it_can_be_mapped_and_differentiated():
    x = jnp.linspace(-3, 3, 60).reshape(3, 20)
    with ops.use_implementations(gelu="native"):
        np.testing.assert_array_equal(jax.vmap(ops.gelu)(x), native(x))
        slopes = jax.grad(lambda x: jnp.sum(ops.gelu(x) ** 2))(x)
    np.testing.assert_allclose(slopes, jax.grad(lambda x: jnp.sum(ops.gelu.reference(x) ** 2))(x), rtol=1e-5, atol=1e-6)
