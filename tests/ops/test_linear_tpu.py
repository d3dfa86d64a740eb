"""The TPU's kernel of products with 8-bit integers in groups, interpreted: memory that nothing wrote is NaN."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from verax import ops
from verax.ops.tpu.linear import MAX_ROWS, MAX_SIZE_IN, _linear_pallas
from verax.ops.tpu.linear_kernel import grouped_product

INTERPRETED = pltpu.InterpretParams(uninitialized_memory="nan")


def problem(group, rows, F, D, zeros=False):
    """Inputs that bfloat16 holds, a weight, and their product in float64."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, D)), jnp.bfloat16).astype(jnp.float32)
    weight = ops.quantize(jnp.asarray(rng.standard_normal((F, D)), jnp.float32), 8, group)
    if zeros:
        weight = replace(weight, zeros=jnp.asarray(rng.integers(-128, 127, weight.scales.shape), jnp.int8))
    return x, weight, np.asarray(x, np.float64) @ np.asarray(weight.dequantize(), np.float64).T


@pytest.mark.parametrize(
    ("group", "rows", "F", "D", "zeros"),
    [
        (32, 1, 70, 160, False),
        (32, 17, 300, 1056, True),
        (64, 3, 129, 704, True),
        (64, 64, 128, 64, False),
        (128, 16, 640, 640, False),
        (128, 33, 1100, 1408, True),
    ],
)
def test_products_are_those_of_the_weight(group, rows, F, D, zeros):
    x, weight, expected = problem(group, rows, F, D, zeros)
    out = grouped_product(x, weight, interpret=INTERPRETED)
    np.testing.assert_allclose(out, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("group", [32, 128])
def test_nan_stays_in_its_row(group):
    x, weight, expected = problem(group, 5, 33, 384)
    out = np.asarray(grouped_product(x.at[2, 7].set(jnp.nan), weight, interpret=INTERPRETED))
    assert np.isnan(out[2]).all()
    kept = [0, 1, 3, 4]
    np.testing.assert_allclose(out[kept], expected[kept], atol=2e-6 * np.abs(expected).max())


def test_the_operation_adds_the_bias_and_its_gradient_is_that_of_the_reference(monkeypatch):
    x, weight, expected = problem(64, 6, 40, 192)
    x, bias = x.reshape(2, 3, 192), jnp.arange(40.0)
    monkeypatch.setattr(
        "verax.ops.tpu.linear_kernel.grouped_product",
        lambda x, weight: grouped_product(x, weight, interpret=INTERPRETED),
    )
    out, pull = jax.vjp(lambda x: _linear_pallas(x, weight, bias), x)
    np.testing.assert_allclose(
        out, (expected + np.arange(40)).reshape(2, 3, 40), atol=2e-6 * np.abs(expected).max(), rtol=1e-6
    )
    (found,) = pull(jnp.ones_like(out))
    (theirs,) = jax.vjp(lambda x: ops.linear.reference(x, weight, bias), x)[1](jnp.ones_like(out))
    np.testing.assert_allclose(found, theirs, rtol=1e-5)


def chosen(rows=4, bits=8, group=64, size_in=128, **changes):
    weight = jax.eval_shape(lambda: ops.quantize(jnp.zeros((256, size_in)), bits, group))
    return ops.linear.select(jax.ShapeDtypeStruct((rows, size_in), jnp.float32), replace(weight, **changes)).name


def test_it_runs_where_it_is_named_and_takes_the_call():
    with ops.use_target("tpu", "TPU v5 lite"):
        assert chosen() == "dequantized"
        with ops.use_implementations(linear="pallas"):
            assert chosen() == chosen(rows=MAX_ROWS, group=32, size_in=MAX_SIZE_IN) == "pallas"
            assert chosen(zeros=jax.ShapeDtypeStruct((256, 2), jnp.int8)) == "pallas"
            for other in (
                {"rows": MAX_ROWS + 1},
                {"group": None},
                {"bits": 4},
                {"size_in": MAX_SIZE_IN + 64},
                {"values": jax.ShapeDtypeStruct((256, 128), jnp.float8_e4m3fn)},
            ):
                assert chosen(**other) == "dequantized"
            assert chosen(order=jax.ShapeDtypeStruct((128,), jnp.int32)) == "reordered"
            assert chosen(rounds_inputs=True) == "integers"
    with ops.use_implementations(linear="pallas"):
        assert chosen() != "pallas"
