"""The GPU's kernels of few rows with several weights, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.ops.gpu import linear as gpu_linear
from verax.ops.gpu.linear import joined_products


def problem(rows, sizes, D):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, D)), jnp.bfloat16)
    return x, [jnp.asarray(rng.standard_normal((F, D)) * D**-0.5, jnp.bfloat16) for F in sizes]


def exact(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize(("rows", "sizes", "D"), [(1, (70, 33), 200), (4, (64, 32, 96), 256), (16, (50, 50, 10), 130)])
def test_products_with_several_weights_equal_float64(rows, sizes, D):
    x, weights = problem(rows, sizes, D)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float32)[: len(sizes)]
    outs = joined_products(x, weights, dtypes, interpret=True)
    assert [out.dtype for out in outs] == list(dtypes)
    for out, weight in zip(outs, weights, strict=True):
        np.testing.assert_allclose(out, exact(x, weight), atol=1e-5 if out.dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize(("rows", "F", "D"), [(1, 33, 200), (16, 96, 256)])
def test_swiglu_equals_float64_and_a_nan_stays_in_its_row(rows, F, D):
    x, weights = problem(rows, (F, F), D)
    gate, up = (exact(x, weight) for weight in weights)
    (out,) = joined_products(x, weights, [jnp.float32], gated=True, interpret=True)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, atol=2e-5)
    (out,) = joined_products(x.at[0, 3].set(jnp.nan), weights, [jnp.float32], gated=True, interpret=True)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()


def test_gradients_equal_the_references(monkeypatch):
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
def test_they_run_on_the_calls_that_they_take(rows, dtype, biases, device, expected):
    x, weights = jax.ShapeDtypeStruct((rows, 128), jnp.float32), [jax.ShapeDtypeStruct((64, 128), dtype)] * 2
    with ops.use_target("gpu", device):
        assert ops.multi_linear.select(x, weights, biases).name == expected
        assert ops.swiglu.select(x, *weights, *(biases or [])).name == expected
