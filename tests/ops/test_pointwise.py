"""`gelu` against its definition in float64, for small, large and special values."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from verax.ops import gelu


def test_values_are_those_of_the_definition():
    x = np.concatenate([np.linspace(-12, 12, 20_001), [1e-30, -1e-30, 3e38, -3e38]]).astype(np.float32)
    exact = [0.5 * float(value) * (1 + math.erf(float(value) / math.sqrt(2))) for value in x]
    for function in (gelu, jax.jit(gelu)):
        np.testing.assert_allclose(function(jnp.asarray(x)), exact, rtol=2e-7, atol=1.2e-6)


def test_infinity_and_nan():
    np.testing.assert_array_equal(gelu(jnp.array([np.inf, np.nan])), [np.inf, np.nan])
