"""The native grouped kernel at every level: exact, and the same for a row whatever other rows there are."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from verax import ops
from verax.ops.cpu import library

pytestmark = needs_library

PRECISIONS = ["float32", "bfloat16", "float8", (8, None), (8, 32), (8, 64), (4, 32), (4, 128)]


def stack(precision, E=6, F=37, D=128, seed=0):
    weights = jnp.asarray(np.random.default_rng(seed).standard_normal((E, F, D)), jnp.float32)
    if precision == "float8":
        return replace(stack((8, 64), E, F, D, seed), values=(30 * weights).astype(jnp.float8_e4m3fn))
    if isinstance(precision, str):
        return weights.astype(precision)
    return jax.jit(jax.vmap(lambda w: ops.quantize(w, *precision)))(weights)


def matrix(weights, i):
    return jax.tree.map(lambda part: part[i], weights)


@jax.jit
def native(x, weights, groups):
    with ops.use_implementations(grouped_linear="native"):
        return ops.grouped_linear(x, weights, groups)


@jax.jit
def many(x, weights, groups):
    with ops.use_implementations(grouped_linear="native_gemm"):
        return ops.grouped_linear(x, weights, groups)


@jax.jit
def linear(x, weight):
    with ops.use_implementations(linear="native"):
        return ops.linear(x, weight)


@for_each_level
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_a_row_equals_the_linear_kernels_to_the_last_bit(level, precision):
    weights = stack(precision)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((40, 1, 128)), jnp.float32)
    choices = {
        "spread": rng.integers(0, 6, (40, 3)),
        "some empty": rng.integers(2, 4, (40, 3)),
        "all in one": np.full((40, 3), 5),
    }
    with library.use_level(level):
        expected = np.stack([linear(x[:, 0], matrix(weights, i)) for i in range(6)])
        for groups in choices.values():
            y = np.asarray(native(x, weights, jnp.asarray(groups, jnp.int32)))
            np.testing.assert_array_equal(y, expected[groups, np.arange(40)[:, None]])
        alone = native(x[:1], weights, jnp.asarray(choices["spread"][:1], jnp.int32))
        np.testing.assert_array_equal(alone[0], expected[choices["spread"][0], 0])


@for_each_level
@pytest.mark.parametrize(
    ("D", "F", "dtype"),
    [
        *((1, 48, "float32"), (31, 7, "float32"), (33, 48, "float32"), (100, 1, "float32")),
        *((1, 7, "bfloat16"), (31, 48, "bfloat16"), (33, 1, "bfloat16"), (100, 7, "bfloat16")),
    ],
)
def test_odd_sizes_are_exact_to_rounding(level, D, F, dtype):
    weights = stack(dtype, F=F, D=D)
    rng = np.random.default_rng(1)
    x, groups = jnp.asarray(rng.standard_normal((9, D)), jnp.float32), jnp.asarray(rng.integers(0, 6, 9), jnp.int32)
    inputs = np.asarray(x.astype(dtype), np.float64)
    exact = np.einsum("td,tfd->tf", inputs, np.asarray(weights, np.float64)[np.asarray(groups)])
    with library.use_level(level):
        np.testing.assert_allclose(native(x, weights, groups), exact, rtol=1e-5, atol=2e-6 * D)


def test_many_rows_are_shared_over_the_threads():
    weights, rng = stack("bfloat16", E=3, F=64), np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((1500, 1, 128)), jnp.float32)
    groups = jnp.asarray(rng.integers(0, 3, (1500, 2)), jnp.int32)
    expected = ops.grouped_linear.reference(x, weights, groups)
    np.testing.assert_allclose(native(x, weights, groups), expected, rtol=1e-5, atol=1e-4)


@for_each_level
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_of_many_rows_is_exact_and_its_rows_do_not_depend_on_each_other(level, dtype):
    weights, rng = stack(dtype, E=3, F=48, D=96), np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((150, 1, 96)), jnp.float32)
    groups = jnp.asarray(rng.integers(0, 2, (150, 2)), jnp.int32)  # one group is empty
    with library.use_level(level):
        y, alone = many(x, weights, groups), many(x[:1], weights, groups[:1])
        runs_here = library.has("fma")
    chosen = np.asarray(weights, np.float64)[np.asarray(groups)]
    exact = np.einsum("td,tkfd->tkf", np.asarray(x[:, 0].astype(dtype), np.float64), chosen)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-4)
    if runs_here:
        np.testing.assert_array_equal(alone, y[:1])


def test_the_product_of_many_rows_is_chosen_by_the_shapes():
    if not library.has("fma"):
        pytest.skip("on this machine it is not faster")
    weights, least = stack("float32", F=48), 6 * 12
    for tokens, name in ((least - 1, "native"), (least, "native_gemm")):
        x, groups = jnp.ones((tokens, 128)), jnp.zeros(tokens, jnp.int32)
        assert ops.grouped_linear.select(x, weights, groups).name == name


def test_arrays_that_do_not_fit_are_refused():
    x, groups = jnp.ones((4, 128)), jnp.zeros(4, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected weights"):
        library.call("verax_grouped_linear", (4, 37), x, groups, jnp.ones((6, 37, 64)), many=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="multiple of M"):
        library.call("verax_grouped_linear", (3, 37), x, groups[:3], jnp.ones((6, 37, 128)), many=False)
