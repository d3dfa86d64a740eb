"""`ops.swap_pairs`: a product on TPU, a reversal elsewhere, with the same bits and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.jaxprs import primitives
from verax import ops


@pytest.mark.parametrize("name", ops.swap_pairs.implementations)
@pytest.mark.parametrize("shape", [(2,), (3, 6), (2, 5, 3, 128)])
def test_neighbours_change_places_with_all_of_their_bits(name, shape):
    rng = np.random.default_rng(len(shape))
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-30, 30, shape)).astype(np.float32)
    expected = np.stack([x[..., 1::2], x[..., ::2]], axis=-1).reshape(shape)
    with ops.use_implementations(swap_pairs=name):
        np.testing.assert_array_equal(ops.swap_pairs(jnp.asarray(x)), expected)


@pytest.mark.parametrize("name", ops.swap_pairs.implementations)
def test_gradients_change_places_back(name):
    weights = jnp.arange(12.0).reshape(2, 6)
    with ops.use_implementations(swap_pairs=name):
        computed = jax.grad(lambda x: (ops.swap_pairs(x) * weights).sum())(jnp.ones((2, 6)))
    np.testing.assert_array_equal(computed, [[1, 0, 3, 2, 5, 4], [7, 6, 9, 8, 11, 10]])


@pytest.mark.parametrize(("platform", "multiplies"), [("cpu", False), ("gpu", False), ("tpu", True)])
def test_only_programs_for_tpu_multiply_and_in_the_highest_precision(platform, multiplies):
    with ops.use_target(platform):
        program = jax.make_jaxpr(lambda x: ops.swap_pairs(x))(jnp.ones((2, 6)))
    assert ("dot_general" in primitives(program)) == multiplies
    assert ("HIGHEST" in str(program)) == multiplies
