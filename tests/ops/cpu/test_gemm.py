"""The native matmul of many rows at every level, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from verax import ops
from verax.ops.cpu import library

pytestmark = needs_library


def arrays(m, k, n, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    return draw(m, k), draw(n, k), draw(n)


@jax.jit
def native(x, w, bias=None):
    with ops.use_forms(linear="native_many"):
        return ops.linear(x, w, bias)


def exact(x, w, bias: Any = 0.0):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + np.asarray(bias, np.float64)


@for_each_level
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 32, 16), (7, 64, 48), (40, 416, 64), (200, 32, 80), (33, 800, 496), (0, 32, 16)],
)
def test_every_shape_is_exact_to_rounding(level, m, k, n):
    # More than one piece of K (384), block of rows (192) and of columns (384); tiles, strips and pieces that end early.
    x, w, bias = arrays(m, k, n)
    with library.use_level(level):
        np.testing.assert_allclose(native(x, w, bias), exact(x, w, bias), rtol=1e-5, atol=3e-6 * k)
        np.testing.assert_allclose(native(x, w), exact(x, w), rtol=1e-5, atol=3e-6 * k)


@for_each_level
def test_a_row_does_not_depend_on_its_batch(level):
    x, w, bias = arrays(200, 416, 64)
    with library.use_level(level):
        whole = np.asarray(native(x, w, bias))
        np.testing.assert_array_equal(native(x[100:140], w, bias), whole[100:140])


def test_it_runs_where_rows_are_many_and_the_kernel_takes_the_weight():
    chosen = lambda *sizes: ops.linear.select(*arrays(*sizes)).name  # noqa: E731
    with library.use_level(library.levels()[0]):
        many = "native_many" if library.level() == "avx512_bf16" else "plain"
        assert chosen(24, 64, 48) == chosen(33, 64, 48) == many
        assert chosen(23, 64, 48) == "native"
        assert chosen(33, 65, 48) == chosen(33, 64, 47) == "plain"
        x, w, _ = arrays(33, 64, 48)
        assert ops.linear.select(x, w.astype(jnp.float32)).name == "plain"
    with library.use_level("portable"):
        assert chosen(33, 64, 48) == "plain"


def test_it_can_be_differentiated():
    x, w, bias = arrays(40, 64, 48)

    def loss(form, x, w, bias):
        with ops.use_forms(linear=form):
            return jnp.sum(jnp.tanh(ops.linear(x.reshape(2, 20, 64), w, bias)))

    gradients = [jax.jit(jax.grad(lambda *a, f=form: loss(f, *a), (0, 1, 2)))(x, w, bias) for form in FORMS]
    for got, wanted in zip(*gradients, strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(wanted), rtol=0.02, atol=0.02)


FORMS = ("native_many", "plain")
