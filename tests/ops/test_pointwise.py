"""The norms and GELU by the reference and by the C++ kernels at every level, against their definitions in float64."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import NATIVE, at_level, needs_library
from verax import ops

NORMS = {"rms_norm": 0, "layer_norm": 1, "layer_norm of a sum": 2}
"""Norms, and the arrays that they have in addition to x and the weight: a bias, and a residual."""

each_form = pytest.mark.parametrize("by", ["reference", *NATIVE])
each_norm = pytest.mark.parametrize("norm", NORMS)


@cache
def program(operation, implementation):
    @jax.jit
    def run(x, *rest):
        with ops.use_implementations(**{operation: implementation}):
            return call(operation, x, *rest)

    return run


def call(operation, x, *rest):
    if operation == "layer_norm":
        return ops.layer_norm(x, *rest[:2], 1e-6, *rest[2:])
    return ops.rms_norm(x, *rest, 1e-6) if operation == "rms_norm" else ops.gelu(x)


def run(by, operation, *arrays):
    implementation, level = at_level(by)
    with level:
        return np.asarray(program(operation.partition(" ")[0], implementation)(*arrays))


def arrays(norm, shape, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    x, residual = (rng.standard_normal(shape) * 3 + 5 for _ in range(2))
    if norm == "rms_norm":  # rows of very different sizes
        x *= np.exp(rng.standard_normal(shape[:-1]) * 4)[..., None]
    weights = [jnp.asarray(rng.standard_normal(shape[-1]), dtype) for _ in range(2)]
    rest = [*weights, jnp.asarray(residual, jnp.float32)][: 1 + NORMS[norm]]
    return jnp.asarray(x, jnp.float32), *rest


@each_form
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@each_norm
def test_every_shape_of_a_norm_is_exact_to_rounding(by, norm, dtype):
    for shape in ((3, 1), (1, 7), (5, 64), (2, 3, 129), (0, 8), (70, 1024)):
        x, weight, *rest = arrays(norm, shape, dtype)
        wide = np.asarray(x + rest[1] if len(rest) == 2 else x, np.float64)
        centred = wide - (wide.mean(-1, keepdims=True) if rest else 0)
        exact = centred / np.sqrt(np.mean(centred * centred, -1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
        exact += np.asarray(rest[0], np.float64) if rest else 0
        bounds = {"rtol": 1e-5, "atol": 5e-6} if rest else {"rtol": 2e-6, "atol": 1e-7}
        np.testing.assert_allclose(run(by, norm, x, weight, *rest), exact, **bounds)


@each_form
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_silu_of_a_norm_is_exact_to_rounding(by, dtype):
    for shape in ((3, 1), (2, 3, 129), (0, 8), (70, 96)):
        x, weight = arrays("rms_norm", shape)
        x = x.astype(dtype)
        implementation, level = at_level(by)
        with level, ops.use_implementations(rms_norm=implementation):
            y = jax.jit(lambda x, w: ops.rms_norm(x, w, 1e-6, silu=True, dtype=dtype))(x, weight)
        wide = np.asarray(x, np.float64)
        exact = wide / np.sqrt(np.mean(wide * wide, -1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
        exact /= 1 + np.exp(-exact)
        assert y.dtype == dtype
        bounds = {"rtol": 4e-6, "atol": 2e-7} if dtype == jnp.float32 else {"rtol": 2**-8, "atol": 1e-6}
        np.testing.assert_allclose(np.asarray(y, np.float64), exact, **bounds)


@pytest.mark.parametrize("by", NATIVE)
@each_norm
def test_zeros_nan_and_infinity_stay_in_their_rows(by, norm):
    x, *rest = arrays(norm, (4, 100))
    x = x.at[0].set(0).at[1, 99].set(jnp.nan).at[2, 5].set(jnp.inf)
    y, expected = run(by, norm, x, *rest), run("reference", norm, x, *rest)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_allclose(y[[0, 3]], expected[[0, 3]], rtol=1e-5, atol=1e-6)
    assert norm != "rms_norm" or (y[0] == 0).all()


@needs_library
@pytest.mark.parametrize("operation", [*NORMS, "gelu"])
def test_kernels_can_be_mapped_and_differentiated(operation):
    given = arrays("rms_norm" if operation == "gelu" else operation, (3, 40))
    given = given[:1] if operation == "gelu" else given
    name = operation.partition(" ")[0]
    slopes = []
    for implementation in ("native", "reference"):
        with ops.use_implementations(**{name: implementation}):
            total = lambda *given: jnp.sum(jnp.sin(call(name, *given)))
            slopes.append(jax.grad(total, tuple(range(len(given))))(*given))
    for ours, theirs in zip(*slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    with ops.use_implementations(**{name: "native"}):
        mapped = jax.vmap(lambda x: call(name, x, *given[1:3]))(given[0])
    np.testing.assert_array_equal(mapped, run("native", operation, *given[:3]))


@each_form
def test_a_bias_keeps_its_digits_next_to_a_weight_of_fewer(by):
    x, weight, bias = arrays("layer_norm", (3, 40))
    weight = weight.astype(jnp.bfloat16)
    got = run(by, "layer_norm", x, weight, bias * 100) - run(by, "layer_norm", x, weight, bias * 0)
    np.testing.assert_allclose(got, np.broadcast_to(bias * 100, (3, 40)), rtol=1e-5, atol=1e-4)


def test_jit_may_trace_eps(unchecked):
    x, weight, bias = arrays("layer_norm", (3, 40))
    np.testing.assert_allclose(jax.jit(ops.rms_norm)(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6), rtol=1e-6)
    expected = ops.layer_norm(x, weight, bias, 1e-6)
    np.testing.assert_allclose(jax.jit(ops.layer_norm)(x, weight, bias, 1e-6), expected, rtol=1e-5, atol=1e-6)


@each_form
def test_gelu_equals_its_definition(by):
    for shape in ((20_001,), (3, 7), (0, 8), (2, 40_000)):
        x = np.linspace(-12, 12, math.prod(shape), dtype=np.float32).reshape(shape)
        exact = [value / 2 * (1 + math.erf(value / math.sqrt(2))) for value in x.reshape(-1).tolist()]
        atol = 1.2e-6 if by == "reference" else 3e-7
        np.testing.assert_allclose(run(by, "gelu", jnp.asarray(x)).reshape(-1), exact, rtol=2e-7, atol=atol)
    special = jnp.array([np.inf, np.nan, 3e38, -3e38, 0, *([-np.inf] if by in NATIVE else [])])
    expected = [np.inf, np.nan, np.float32(3e38), 0, 0, *([0] if by in NATIVE else [])]
    np.testing.assert_array_equal(run(by, "gelu", special), expected)


@pytest.mark.parametrize("by", NATIVE)
def test_small_negative_results_of_gelu_keep_their_digits(by):
    x = np.linspace(-5, -1e-30, 1001, dtype=np.float32)
    exact = [value / 2 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()]
    np.testing.assert_allclose(run(by, "gelu", jnp.asarray(x)), exact, rtol=3e-5)
