"""The grouped linear operation in every implementation that runs here: each row by the matrix of its group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.ops.grouped import grouped_linear

IMPLEMENTATIONS = ["reference", "ragged_dot", "gathered"]
PLAIN = [None, (8, None), (8, 32), (4, 32)]
"""Precisions: of an array, or bits and the inputs that share a scale."""

GROUPS = {
    "all": [[0, 4, 2], [1, 3, 0], [2, 2, 4]],
    "some are empty": [[1, 3, 1], [3, 3, 1]],
    "one has all": [[2, 2]] * 5,
    "one row": [[3]],
    "none": np.zeros((0, 2), int),
}


def case(groups, D=64, F=37, E=5, dtype=jnp.float32, precision=None, seed=0):
    """Arguments, with a row of x for each token, and the exact result."""
    rng = np.random.default_rng(seed)
    groups = jnp.asarray(groups, jnp.int32)
    x = jnp.asarray(rng.standard_normal((len(groups), 1, D)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((E, F, D)), dtype)
    plain = weights
    if precision is not None:
        weights = jax.vmap(lambda w: ops.quantize(w, *precision))(weights)
        plain = jax.vmap(lambda w: w.dequantize())(weights)
    inputs = np.asarray(x.astype(dtype if precision is None else jnp.bfloat16), np.float64)
    exact = np.einsum("td,tkfd->tkf", inputs[:, 0], np.asarray(plain, np.float64)[np.asarray(groups)])
    return (x, weights, groups), exact


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_row_takes_the_matrix_of_its_group(implementation, groups, dtype):
    args, exact = case(GROUPS[groups], dtype=dtype)
    y = jax.jit(grouped_linear.implementations[implementation].function)(*args)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_rows_of_groups_that_are_not_there_are_zeros(implementation):
    (x, weights, groups), exact = case(GROUPS["all"])
    chosen = ops.grouped_linear if implementation is None else grouped_linear.implementations[implementation].function
    y = jax.jit(chosen)(x, weights, jnp.where(groups == 2, -1, jnp.where(groups == 4, 5, groups)))
    known = ~np.isin(groups, (2, 4))
    np.testing.assert_allclose(y, exact * known[..., None], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", ["reference", "gathered"])
@pytest.mark.parametrize("precision", PLAIN[1:])
def test_quantised_matrices(implementation, precision):
    args, exact = case(GROUPS["all"], precision=precision)
    y = jax.jit(grouped_linear.implementations[implementation].function)(*args)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-4)


def test_matrices_with_zero_points_and_orders_of_their_own():
    rng = np.random.default_rng(0)
    (x, _, groups), _ = case(GROUPS["all"])
    parts = [
        ops.QuantizedWeight.from_integers(
            jnp.asarray(rng.integers(-8, 8, (37, 64))),
            jnp.asarray(rng.standard_normal((37, 2)), jnp.float16),
            4,
            32,
            jnp.asarray(rng.integers(-8, 8, (37, 2))),
            jnp.asarray(rng.permutation(64)),
        )
        for _ in range(5)
    ]
    plain = np.stack([part.dequantize() for part in parts])
    inputs = np.asarray(x.astype(jnp.bfloat16), np.float64)[:, 0]
    exact = np.einsum("td,tkfd->tkf", inputs, plain[np.asarray(groups)])
    y = jax.jit(ops.grouped_linear)(x, jax.tree.map(lambda *each: jnp.stack(each), *parts), groups)
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("precision", PLAIN)
def test_the_chosen_implementation_takes_every_precision(precision):
    args, exact = case(GROUPS["all"], precision=precision)
    # A CPU that multiplies integers rounds x to them: 4-bit weights see 8 bits of it.
    loose = 0.02 if precision == (4, 32) else 5e-3
    assert np.abs(jax.jit(ops.grouped_linear)(*args) - exact).max() < loose * np.abs(exact).max()


def test_matrices_that_round_their_inputs():
    (x, weights, groups), _ = case(GROUPS["all"])
    weights = jax.vmap(lambda w: ops.quantize(w, 8, rounds_inputs=True))(weights)
    each = [
        [ops.linear(row[0], jax.tree.map(lambda a, g=g: a[g], weights)) for g in of]
        for row, of in zip(x, groups, strict=True)
    ]
    np.testing.assert_allclose(jax.jit(ops.grouped_linear)(x, weights, groups), each, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("x", [(64,), (1, 64), (3, 64), (2, 1, 64), (2, 3, 64)])
def test_leading_axes_are_broadcast(x):
    (_, weights, _), _ = case(GROUPS["all"])
    rows = jnp.asarray(np.random.default_rng(1).standard_normal(x), jnp.float32)
    groups = jnp.asarray([[0, 2, 4], [1, 1, 3]])
    exact = np.einsum("...d,...fd->...f", *map(np.asarray, (rows, weights[groups])))
    for name in (*IMPLEMENTATIONS, ops.grouped_linear.select(rows, weights, groups).name):
        np.testing.assert_allclose(
            grouped_linear.implementations[name].function(rows, weights, groups), exact, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("implementation", [None, "ragged_dot"])
def test_gradients_equal_the_references(implementation):
    (x, weights, groups), _ = case([[0, 3], [3, 3], [1, 0]])
    wanted = jnp.asarray(np.random.default_rng(2).standard_normal((3, 2, 37)), jnp.float32)

    def loss(x, weights):
        return jnp.sum(ops.grouped_linear(x, weights, groups) * wanted)

    choice = {} if implementation is None else {"grouped_linear": implementation}
    with ops.use_implementations(**choice):
        computed = jax.jit(jax.grad(loss, (0, 1)))(x, weights)
    with ops.use_implementations(grouped_linear="reference"):
        expected = jax.jit(jax.grad(loss, (0, 1)))(x, weights)
    for got, want in zip(computed, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    assert not np.any(computed[1][2])
    assert np.any(computed[1][1])


def test_no_rows_have_a_gradient():
    weights, groups = jnp.ones((4, 16, 32)), jnp.zeros((0, 2), jnp.int32)
    slope = jax.grad(lambda weights: jnp.sum(ops.grouped_linear(jnp.ones((0, 1, 32)), weights, groups)))(weights)
    np.testing.assert_array_equal(slope, jnp.zeros_like(weights))


def test_few_rows_read_their_matrices_only():
    few, many = jnp.zeros((1, 2), jnp.int32), jnp.zeros((9, 2), jnp.int32)
    weights = jnp.zeros((8, 16, 32))
    with ops.use_target("gpu"):
        assert ops.grouped_linear.select(jnp.zeros((1, 1, 32)), weights, few).name == "gathered"
        assert ops.grouped_linear.select(jnp.zeros((9, 1, 32)), weights, many).name == "ragged_dot"
