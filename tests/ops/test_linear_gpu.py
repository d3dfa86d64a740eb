"""The GPU's kernels of products with weights in 8 or 4 bits, interpreted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from verax import ops
from verax.ops.gpu.linear import product

WEIGHTS = {
    "int8": (8, None),
    "int8-32": (8, 32),
    "int8-64": (8, 64),
    "int4-32": (4, 32),
    "int4-128": (4, 128),
    "float8": (8, None),
    "float8-32": (8, 32),
    "float8-128": (8, 128),
}


def problem(kind, rows, F=70, D=384, zeros=False):
    """Inputs that bfloat16 holds, a weight, and its product as the operation has it with bfloat16 weights."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, D)), jnp.bfloat16).astype(jnp.float32)
    dense = jnp.asarray(rng.standard_normal((F, D)), jnp.float32)
    weight = ops.quantize(dense, *WEIGHTS[kind])
    if kind.startswith("float8"):
        weight = replace(weight, values=dense.astype(jnp.float8_e4m3fn))
    if zeros:
        weight = replace(weight, zeros=jnp.asarray(rng.integers(-7, 7, weight.scales.shape), jnp.int8))
    rounded = weight.dequantize(jnp.float32 if weight.bits == 8 else jnp.bfloat16).astype(jnp.float32)
    return x, weight, np.asarray(x, np.float64) @ np.asarray(rounded, np.float64).T


@pytest.mark.parametrize(
    ("kind", "rows", "zeros"),
    [
        ("int8", 1, True),
        ("int8-32", 3, False),
        ("int8-64", 17, True),
        ("int4-32", 3, True),
        ("int4-128", 1, False),
        ("float8", 1, False),
        ("float8-32", 17, False),
        ("float8-128", 64, False),
    ],
)
def test_products_equal_the_weights_in_float64(kind, rows, zeros):
    x, weight, expected = problem(kind, rows, zeros=zeros)
    out = product(x, weight, interpret=True)
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["int8-32", "int4-32", "float8", "float8-32"])
def test_inputs_that_fill_no_tile_and_nan_in_one_row(kind):
    x, weight, expected = problem(kind, 5, F=33, D=160)
    out = np.asarray(product(x.at[2, 7].set(jnp.nan), weight, interpret=True))
    assert np.isnan(out[2]).all()
    kept = [0, 1, 3, 4]
    np.testing.assert_allclose(out[kept], expected[kept], atol=1e-5 * np.abs(expected).max())


def test_every_float8_is_multiplied_as_it_is():
    values = lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8).reshape(8, 32), jnp.float8_e4m3fn)
    weight = ops.QuantizedWeight(values, jnp.full((8, 1), 2.0), 8, 32, None, 8)
    computed = product(jnp.eye(32), weight, interpret=True)
    np.testing.assert_array_equal(computed, ops.linear.reference(jnp.eye(32), weight))


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_gradients_equal_the_references(kind, monkeypatch):
    x, weight, _ = problem(kind, 2)
    monkeypatch.setattr("verax.ops.gpu.linear.product", lambda x, weight: jnp.zeros((x.shape[0], weight.size_out)))
    computed = jax.grad(lambda x: ops.linear.implementations["triton"].function(x, weight).sum())(x)
    expected = jax.grad(lambda x: ops.linear.reference(x, weight).sum())(x)
    np.testing.assert_allclose(computed, expected, rtol=1e-5)


def chosen(kind="int8", rows=4, **changes):
    weight = jax.eval_shape(lambda: ops.quantize(jnp.zeros((256, 128)), *WEIGHTS[kind]))
    return ops.linear.select(jax.ShapeDtypeStruct((rows, 128), jnp.float32), replace(weight, **changes)).name


def test_they_run_where_they_are_named_and_take_the_call():
    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        assert chosen() == "dequantized"
        with ops.use_implementations(linear="triton"):
            assert chosen() == chosen("int4-32", rows=64) == "triton"
            assert chosen(rows=65) == "dequantized"
            assert chosen(order=jax.ShapeDtypeStruct((128,), jnp.int32)) == "reordered"
            assert chosen(rounds_inputs=True) == "integers"
    with ops.use_implementations(linear="triton"):
        assert chosen() != "triton"


def test_float8_weights_are_taken_from_the_compute_capability_that_converts_them():
    values = jax.ShapeDtypeStruct((256, 128), jnp.float8_e4m3fn)
    for device, expected in (
        ("NVIDIA A100-SXM4-80GB", "dequantized"),
        ("NVIDIA L4", "triton"),
        ("NVIDIA H200", "triton"),
    ):
        with ops.use_target("gpu", device), ops.use_implementations(linear="triton"):
            assert chosen(values=values) == expected
            assert chosen("int8-32") == "triton"
