"""Rows in place, materialised arrays and swapped pairs: less memory or time, with the plain program's values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.devices import primitives
from verax import ops

WIDTH = 8


def arrays(B, T):
    rng = np.random.default_rng(B * T)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    return draw(B, T, WIDTH), draw(1, T, WIDTH // 2), draw(B, T)


def in_place(x, table, scale):
    # The second result is also computed from x, whose memory the first one takes.
    return jnp.sin(x) * scale[..., None], (x[..., ::2] * table).astype(jnp.bfloat16), scale.astype(jnp.int32)


def elsewhere(x, table, scale):
    return (x[..., : WIDTH // 2] + table) * scale[..., None]


@pytest.mark.parametrize("function", [in_place, elsewhere])
@pytest.mark.parametrize(("B", "T"), [(1, 2048), (1, 2040), (2, 1021), (1, 2311), (3, 700), (2049, 1)])
def test_blocks_give_the_results_of_the_whole(function, B, T):
    given = arrays(B, T)
    blocks = ops.update_rows.implementations["blocks"]
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda *a: blocks(function, *a))(*given), function(*given))


def test_gradients_equal_the_wholes():
    x, table, scale = arrays(2, 1500)
    assert ops.update_rows.select(in_place, x, table, scale).name == "blocks"
    weight = jnp.linspace(-1.0, 2.0, WIDTH)

    def loss(update, x, table, weight):
        first, second, _ = update(lambda *a: in_place(a[0] * weight, *a[1:]), x, table, scale)
        return (first**2).sum() + second.astype(jnp.float32).sum()

    updates = ops.update_rows, ops.update_rows.reference
    ours, theirs = (jax.grad(partial(loss, update), (0, 1, 2))(x, table, weight) for update in updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4), ours, theirs)


def test_only_many_rows_on_one_cpu_are_divided():
    x = jnp.zeros((1, 2048, WIDTH))
    assert ops.update_rows.select(jnp.sin, x).name == "blocks"
    assert ops.update_rows.select(jnp.sin, x[:, :1024]).is_reference
    assert ops.update_rows.select(jnp.sin, x[:, :0]).is_reference
    for platform in ("gpu", "tpu"):
        with ops.use_target(platform):
            assert ops.update_rows.select(jnp.sin, x).is_reference
    with ops.use_unfused():
        assert ops.update_rows.select(jnp.sin, x).is_reference


def test_memory_between_layers_is_one_blocks_in_any_number_of_layers():
    F = 64 * WIDTH
    up, down = jnp.ones((F, WIDTH)), jnp.ones((WIDTH, F))
    x = jax.ShapeDtypeStruct((1, 16384, WIDTH), jnp.float32)
    size = 4 * x.size

    def feed_forward(x):
        return ops.linear(jnp.tanh(ops.linear(x, up)), down), x.astype(jnp.bfloat16)

    def temporary(layers):
        def run(x):
            for _ in range(layers):
                y, rounded = ops.update_rows(feed_forward, x + 1)
                x = x + y + rounded[:, ::-1]
            return x

        return jax.jit(run).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2) < 3 * size + 3 * 1024 * F * 4  # hidden units of all tokens have 64 times the size
    assert temporary(6) < 1.1 * temporary(2)


X = jnp.linspace(-2.0, 3.0, 24).reshape(2, 12)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", []), ("gpu", []), ("tpu", ["optimization_barrier"])])
def test_only_programs_for_tpu_have_a_barrier(platform, expected):
    with ops.use_target(platform):
        program = jax.make_jaxpr(lambda x: ops.materialize(x))(X)
    assert list(primitives(program)) == expected


@pytest.mark.parametrize("name", ops.materialize.implementations)
def test_values_and_gradients_equal_the_arrays(name):
    def loss(x):
        return (jnp.sin(ops.materialize(x)) ** 2).sum()

    with ops.use_implementations(materialize=name):
        assert (jax.jit(lambda x: ops.materialize(x))(X) == X).all()
        assert jnp.allclose(jax.grad(loss)(X), jnp.sin(2 * X), atol=1e-6)


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
