"""The linear operation against float64, in every implementation that runs here; the GPU's kernels are interpreted."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.gpu import linear as gpu_linear
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


def problem(rows, sizes, D):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, D)), jnp.bfloat16)
    return x, [jnp.asarray(rng.standard_normal((F, D)) * D**-0.5, jnp.bfloat16) for F in sizes]


def exact_product(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize(("rows", "sizes", "D"), [(1, (70, 33), 200), (4, (64, 32, 96), 256), (16, (50, 50, 10), 130)])
def test_the_gpus_products_with_several_weights_equal_float64(rows, sizes, D):
    x, weights = problem(rows, sizes, D)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float32)[: len(sizes)]
    outs = gpu_linear.joined_products(x, weights, dtypes, interpret=True)
    assert [out.dtype for out in outs] == list(dtypes)
    for out, weight in zip(outs, weights, strict=True):
        np.testing.assert_allclose(out, exact_product(x, weight), atol=1e-5 if out.dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize(("rows", "F", "D"), [(1, 33, 200), (16, 96, 256)])
def test_the_gpus_swiglu_equals_float64_and_a_nan_stays_in_its_row(rows, F, D):
    x, weights = problem(rows, (F, F), D)
    gate, up = (exact_product(x, weight) for weight in weights)
    (out,) = gpu_linear.joined_products(x, weights, [jnp.float32], gated=True, interpret=True)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, atol=2e-5)
    (out,) = gpu_linear.joined_products(x.at[0, 3].set(jnp.nan), weights, [jnp.float32], gated=True, interpret=True)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()


def test_the_gpus_gradients_equal_the_references(monkeypatch):
    x, weights = problem(2, (24, 24), 40)
    kernel = lambda x, weights, dtypes, gated=False: tuple(jnp.zeros((2, 24), dtype) for dtype in dtypes)
    monkeypatch.setattr(gpu_linear, "joined_products", kernel)
    for operation, args in ((ops.multi_linear, (weights,)), (ops.swiglu, weights)):
        total = lambda x, run, args=args: sum(y.sum() for y in jax.tree.leaves(run(x, *args)))
        runs = operation.implementations["triton"].function, operation.reference
        computed, expected = (jax.grad(total)(x.astype(jnp.float32), run) for run in runs)
        np.testing.assert_allclose(computed, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "dtype", "biases", "device", "expected"),
    [
        (16, "bfloat16", None, "NVIDIA H100 80GB HBM3", "triton"),
        (17, "bfloat16", None, "NVIDIA H100 80GB HBM3", "reference"),
        (4, "float32", None, "NVIDIA H100 80GB HBM3", "reference"),
        (4, "bfloat16", [None, np.ones(64)], "NVIDIA H100 80GB HBM3", "reference"),
        (4, "bfloat16", None, "NVIDIA T4", "reference"),
    ],
)
def test_the_gpus_kernels_run_on_the_calls_that_they_take(rows, dtype, biases, device, expected):
    x, weights = jax.ShapeDtypeStruct((rows, 128), jnp.float32), [jax.ShapeDtypeStruct((64, 128), dtype)] * 2
    with ops.use_target("gpu", device):
        assert ops.multi_linear.select(x, weights, biases).name == expected
        assert ops.swiglu.select(x, *weights, *(biases or [])).name == expected
