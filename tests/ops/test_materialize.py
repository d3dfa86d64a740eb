"""`ops.materialize`: a barrier on TPU, nothing elsewhere, and the same values and gradients."""

import jax
import jax.numpy as jnp
import pytest

from tests.support.jaxprs import primitives
from verax import ops

X = jnp.linspace(-2.0, 3.0, 24).reshape(2, 12)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", []), ("gpu", []), ("tpu", ["optimization_barrier"])])
def test_only_programs_for_tpu_have_a_barrier(platform, expected):
    with ops.use_target(platform):
        program = jax.make_jaxpr(lambda x: ops.materialize(x))(X)
    assert list(primitives(program)) == expected


@pytest.mark.parametrize("name", ops.materialize.implementations)
def test_values_and_gradients_are_those_of_the_array(name):
    def loss(x):
        return (jnp.sin(ops.materialize(x)) ** 2).sum()

    with ops.use_implementations(materialize=name):
        assert (jax.jit(lambda x: ops.materialize(x))(X) == X).all()
        assert jnp.allclose(jax.grad(loss)(X), jnp.sin(2 * X), atol=1e-6)
