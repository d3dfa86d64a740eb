"""The linear operation against float64, in every implementation that runs here."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.quantized import round_inputs


@pytest.mark.parametrize("implementation", ["reference", "pad_to_two_rows", None])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_row_in_every_implementation(implementation, shape, dtype):
    check((*shape, 67), 35, dtype, implementation)


def test_one_row_is_multiplied_as_two_on_tpus():
    weight = jax.ShapeDtypeStruct((35, 67), jnp.bfloat16)
    with ops.use_target("tpu", "TPU v5 lite"):
        chosen = [ops.linear.select(jax.ShapeDtypeStruct((rows, 67), jnp.float32), weight).name for rows in (1, 2)]
    assert chosen == ["pad_to_two_rows", "reference"]


@pytest.mark.parametrize("shape", [(2,), (3, 5), (0,)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_many_rows_and_none(shape, dtype):
    check((*shape, 67), 35, dtype, None)


@pytest.mark.parametrize("implementation", ["reference", "integers", None])
@pytest.mark.parametrize("shape", [(67,), (2, 5, 67), (0, 67)])
def test_inputs_become_integers_with_a_weight_that_rounds_them(implementation, shape):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, (*shape[:-1], 1)), jnp.float32)
    weight = replace(ops.quantize(jnp.asarray(rng.standard_normal((35, 67)), jnp.float32), 8), rounds_inputs=True)
    bias = jnp.asarray(rng.standard_normal(35), jnp.float32)
    integers, scale = (np.asarray(part, np.float64) for part in round_inputs(x))
    assert np.abs(integers).max(initial=0) <= 127
    assert np.all(np.abs(integers * scale - np.asarray(x)) <= 0.501 * scale)
    w = np.asarray(weight.integers(), np.float64) * np.asarray(weight.scales, np.float64)
    choices = {} if implementation is None else {"linear": implementation}
    with ops.use_implementations(**choices):
        assert ops.linear.select(x, weight, bias).name == (implementation or "integers")
        y = ops.linear(x, weight, bias)
    expected = integers @ w.T * scale + np.asarray(bias, np.float64)
    # Terms are of the row's size, whatever they add up to.
    assert np.all(np.abs(y - expected) <= 2e-6 * (1 + np.abs(expected).max(-1, keepdims=True)))


@pytest.mark.parametrize("implementation", ["reference", "integers", None])
@pytest.mark.parametrize("packed", [False, True])
def test_derivatives_pass_inputs_that_become_integers(implementation, packed):
    rng = np.random.default_rng(0)
    x, w, wanted = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 64), (48, 64), (5, 48)))
    weight = ops.quantize(w, 8, rounds_inputs=True)
    given = ops.pack_weight(weight) if packed and implementation is None else weight
    with ops.use_implementations(**{} if implementation is None else {"linear": implementation}):
        slope = jax.grad(lambda x: jnp.vdot(ops.linear(x, given), wanted))(x)
    np.testing.assert_allclose(slope, wanted @ weight.dequantize(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ops.linear.implementations)
def test_an_implementation_that_is_chosen_by_name_leaves_weights_that_it_does_not_accept_to_others(implementation):
    if not ops.linear.implementations[implementation].available():
        pytest.skip(f"{implementation} needs a library that is not here")
    x, products = products_of_each_kind()
    with ops.use_implementations(linear=implementation):
        for weight, expected in products:
            y = ops.linear(x, weight)
            assert np.max(np.abs(y - expected)) < 0.01 * np.max(np.abs(expected))


@cache
def products_of_each_kind():
    """Three rows, and weights of each kind with their products by the reference."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 64), (48, 64)))
    grouped = ops.quantize(w, 8, 32)
    weights = [w, w.astype(jnp.float16), ops.quantize(w, 8), ops.quantize(w, 8, rounds_inputs=True), grouped]
    weights += [ops.quantize(w, 4, 32), ops.quantize(w, 8, is_float=True), ops.PackedWeight.from_weight(w)]
    weights += [replace(grouped, order=jnp.asarray(rng.permutation(64), jnp.int32))]
    weights += [replace(grouped, zeros=jnp.full((48, 2), 3, jnp.int8))]
    blocks = ops.BlockQuantizedWeight.from_blocks("Q8_0", rng.integers(0, 64, (48, 68)).astype(np.uint8))
    weights += [jax.tree.map(jnp.asarray, blocks)]
    return x, [(weight, np.asarray(ops.linear.reference(x, weight))) for weight in weights]


def test_plain_integers_are_not_taken_for_a_weight(unchecked):
    for x in (jnp.ones((1, 32)), jnp.ones((300, 32))):
        with pytest.raises(InvalidParameterError, match="weight: expected floats or a QuantizedWeight, got int8"):
            ops.linear(x, jnp.ones((16, 32), jnp.int8))


def test_small_weights_of_many_rows_are_joined():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 150, 48)), jnp.float32)
    weights = [jnp.asarray(rng.standard_normal((size, 48)), jnp.float32) for size in (12, 40, 7)]
    biases = [None, jnp.ones(40), jnp.zeros(7)]
    assert ops.multi_linear.select(x, weights).name == "concatenated"
    for y, weight, bias in zip(ops.multi_linear(x, weights, biases), weights, biases, strict=True):
        np.testing.assert_allclose(y, ops.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    others = (x[:1], weights), (x, [*weights, jnp.zeros((513, 48))]), (x, [weights[0], weights[1].astype(jnp.bfloat16)])
    assert all(ops.multi_linear.select(*other).name != "concatenated" for other in others)
    assert ops.multi_linear.select(x, [ops.quantize(jnp.zeros((32, 48)), 8)]).name != "concatenated"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_weights_are_not_concatenated_on_accelerators(platform):
    x, weights = jnp.zeros((300, 48)), [jnp.zeros((size, 48)) for size in (12, 40, 7)]
    with ops.use_target(platform):
        assert ops.multi_linear.select(x, weights).is_reference


def check(shape, size_out, dtype, implementation):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    w = jnp.asarray(rng.standard_normal((size_out, shape[-1])), dtype)
    b = jnp.asarray(rng.standard_normal(size_out), dtype)
    exact = np.asarray(x.astype(dtype), np.float64) @ np.asarray(w, np.float64).T + np.asarray(b, np.float64)
    choice = {} if implementation is None else {"linear": implementation}
    with ops.use_implementations(**choice):
        y = jax.jit(ops.linear)(x, w, b)
    assert y.shape == exact.shape
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-4)
