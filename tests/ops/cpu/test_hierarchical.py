"""The native kernels of LAM's published rules at every level, against the references in float64."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from tests.support.hierarchical import flux, inputs
from verax import ops
from verax.ops.cpu import library
from verax.ops.hierarchical import HierarchicalInputs

pytestmark = needs_library

RULES = ("hierarchical_rule", "local_rule")


@lru_cache
def outputs(rule, implementation, chunk_size):
    """A program of outputs, which serves every level: the level is looked up when it runs."""
    function = ops.operations()[rule].implementations[implementation].function
    return jax.jit(lambda x: function(x, chunk_size=chunk_size)[0])


def run(rule, implementation, x, weights, chunk_size):
    return outputs(rule, implementation, chunk_size)(HierarchicalInputs(**x, flux=weights))


def error(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


# One token; one block and not full; blocks and a rest; chunks; sizes that fill no register, or are not alike.
@for_each_level
@pytest.mark.parametrize(
    ("T", "chunk_size", "K", "V"), [(1, 64, 8, 8), (63, 64, 32, 32), (130, 130, 20, 36), (256, 128, 32, 32)]
)
@pytest.mark.parametrize("keys", ["random", "zero rows"])
def test_results_are_those_of_the_equations(level, T, chunk_size, K, V, keys):
    x, weights = inputs(T=T, K=K, V=V, keys=keys), flux(K=K, V=V)
    for rule in RULES:
        with jax.enable_x64(True):
            exact = run(rule, "reference", jax.tree.map(lambda a: a.astype(np.float64), x), weights, chunk_size)
        with library.use_level(level):
            assert error(run(rule, "native", x, weights, chunk_size), exact) < 5e-6


# Four chunks: the fast and the slow state are alike until the third.
def test_states_and_what_is_read_from_each_are_those_of_the_reference():
    x = HierarchicalInputs(**jax.tree.map(jnp.asarray, inputs(T=128)), flux=flux())
    implementations = ops.operations()["hierarchical_rule"].implementations
    native, reference = (
        implementations[implementation].function(x, chunk_size=32) for implementation in ("native", "reference")
    )
    for a, b in zip(jax.tree.leaves(native), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_the_reference(rule):
    x, weights = inputs(T=64, K=8, V=12), flux(K=8, V=12)

    def loss(arguments, implementation):
        x, weights = arguments
        return jnp.sum(jnp.sin(run(rule, implementation, x, weights, 32)))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    native, reference = (gradient((x, weights), implementation) for implementation in ("native", "reference"))
    for a, b in zip(jax.tree.leaves(native), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(np.abs(b).max())))


def test_native_forms_are_chosen_here():
    x = HierarchicalInputs(**inputs(), flux=flux())
    for rule in RULES:
        assert ops.operations()[rule].select(x, chunk_size=64).name == "native"
