"""The native linear kernels at every level, against the reference and against float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from verax import ops
from verax.ops.cpu import library

pytestmark = needs_library


def arrays(m, k, n, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.float32)
    return x, jnp.asarray(rng.standard_normal((n, k)), dtype)


@jax.jit
def _native(x, w, bias):
    with ops.use_implementations(linear="native"):
        return ops.linear(x, w, bias)


def native(x, w, bias=None):
    return np.asarray(_native(x, w, bias))  # a program serves every level: the level is looked up when it runs


@jax.jit
def native_each(inputs, w):
    """Products of inputs of several sizes in one program: a program takes longer to compile than to run."""
    with ops.use_implementations(linear="native"):
        return [ops.linear(x, w) for x in inputs]


quantize = jax.jit(ops.quantize, static_argnums=(1, 2))
dequantize = jax.jit(lambda weight: weight.dequantize())


def rows(q, n):
    """A quantised weight of the first rows of one."""
    if q.bits == 8:
        return replace(q, values=q.values[:n], scales=q.scales[:n], size_out=n)
    zeros = q.row_zeros()
    integers, scales, zeros = q.integers()[:n], q.row_scales()[:n], None if zeros is None else zeros[:n]
    return ops.QuantizedWeight.from_integers(integers, scales, 4, q.group_size, zeros)


@jax.jit
def with_zeros(q, zeros):
    return ops.QuantizedWeight.from_integers(q.integers(), q.row_scales(), 4, q.group_size, zeros)


@jax.jit
def first_rows(q):
    """Weights of `ROWS` rows, in one program: a program takes longer to compile than to run."""
    return [rows(q, n) for n in ROWS]


ROWS = (1, 3, 7, 64, 129)
SIZES = (0, 1, 2, 3, 5, 8, 16, 17)


@jax.jit
def native_grid(inputs, weights):
    """Products of each input with each weight, in one program."""
    with ops.use_implementations(linear="native"):
        return [[ops.linear(x, w) for x in inputs] for w in weights]


@for_each_level
@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 100, 257])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_shape_is_exact_to_rounding(level, k, dtype):
    with library.use_level(level):
        x, w = map(np.asarray, arrays(17, k, max(ROWS), dtype))
        exact = x.astype(dtype).astype(np.float64) @ w.astype(np.float64).T
        grid = native_grid([x[:m] for m in SIZES], [w[:n] for n in ROWS])
        for n, outputs in zip(ROWS, grid, strict=True):
            for m, y in zip(SIZES, outputs, strict=True):
                np.testing.assert_allclose(y, exact[:m, :n], rtol=1e-5, atol=2e-6 * k)


@for_each_level
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_its_batch(level, dtype):
    x, w = map(np.asarray, arrays(17, 257, 129, dtype))
    cuts = [slice(m) for m in range(1, 17)] + [slice(m, None) for m in range(17)]
    with library.use_level(level):
        whole = native(x, w)
        for cut, y in zip(cuts, native_each([x[cut] for cut in cuts], w), strict=True):
            np.testing.assert_array_equal(y, whole[cut])


@for_each_level
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_come_through_as_in_the_reference(level, dtype, value):
    x, w = arrays(3, 70, 9, dtype)
    x = x.at[1, 69].set(value)
    w = w.at[4, 3].set(value).at[5].set(0)
    with library.use_level(level):
        y = native(x, w)
    reference = np.asarray(ops.linear.reference(x, w))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(reference))
    np.testing.assert_array_equal(np.where(np.isinf(reference), reference, 0), np.where(np.isinf(y), y, 0))


def test_bias_leading_axes_and_other_input_dtypes():
    x, w = arrays(6, 40, 10, jnp.bfloat16)
    bias = jnp.arange(10, dtype=jnp.bfloat16)
    reference = ops.linear.reference(x, w, bias)
    y = native(x.reshape(2, 3, 40), w, bias)
    np.testing.assert_allclose(y, reference.reshape(2, 3, 10), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(native(x.astype(jnp.bfloat16), w, bias), y.reshape(6, 10))


def test_it_can_be_mapped_and_differentiated():
    x, w = arrays(3, 40, 10, jnp.float32)
    with ops.use_implementations(linear="native"):
        many = jax.vmap(ops.linear, (0, None))(jnp.stack([x, 2 * x]), w)
        slope = jax.grad(lambda x, w: jnp.sum(ops.linear(x, w) ** 2), (0, 1))(x, w)
    with ops.use_implementations(linear="reference"):
        expected = jax.grad(lambda x, w: jnp.sum(ops.linear(x, w) ** 2), (0, 1))(x, w)
    np.testing.assert_array_equal(many[1], 2 * many[0])
    for ours, theirs in zip(slope, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_few_rows_run_natively_and_many_do_not():
    _, w = arrays(1, 64, 64, jnp.bfloat16)
    assert ops.linear.select(jnp.ones((1, 64)), w).name == "native"
    assert ops.linear.select(jnp.ones((2, 2, 64)), w).name == "native"
    assert ops.linear.select(jnp.ones((512, 64)), w).name != "native"
    assert ops.linear.select(jnp.ones((512, 64)), w.astype(jnp.float32)).name == "reference"


def taken(x, q):
    """x in float64 as the kernels take it with a quantised weight."""
    if q.is_float:
        return np.asarray(x).astype(jnp.bfloat16).astype(np.float64)
    x, parts = np.asarray(x), []
    together, largest = (q.group_size, np.float32(127)) if q.bits == 4 else (1024, np.float32(32639))
    for begin in range(0, x.shape[1], together):
        part = x[:, begin : begin + together]
        scale = np.abs(part).max(axis=1, keepdims=True) / largest
        parts.append(np.rint(part * (1 / scale)) * scale.astype(np.float64))
    return np.concatenate(parts, axis=1)


SCHEMES = [(8, None), (8, 32), (8, 64), (8, 128), (4, 32), (4, 64), (4, 128)]


@for_each_level
@pytest.mark.parametrize(("bits", "group"), SCHEMES)
def test_quantised_weights_are_exact_to_rounding(level, bits, group):
    with library.use_level(level):
        # 4224 inputs: more than the kernel makes scales of at a time
        for k in (1, 31, 33, 257, 1088) if group is None else (group, 3 * group, 4224):
            x, w = map(np.asarray, arrays(17, k, max(ROWS), jnp.float32))
            q = quantize(w, bits, group)
            exact = taken(x, q) @ np.asarray(dequantize(q), np.float64).T
            grid = native_grid([x[:m] for m in SIZES], first_rows(q))
            for n, outputs in zip(ROWS, grid, strict=True):
                for m, y in zip(SIZES, outputs, strict=True):
                    np.testing.assert_allclose(y, exact[:m, :n], rtol=1e-5, atol=1e-4)


def stored(w, kind, group):
    """A weight as checkpoints have them: of 8-bit floats, or with a zero point for each scale, about `w`."""
    q = quantize(w, 8 if kind == "float8" else 4, group)
    if kind == "float8":
        return replace(q, values=np.asarray(30 * w, jnp.float8_e4m3fn))
    zeros = np.random.default_rng(1).integers(-8, 8, (len(w), w.shape[1] // group))
    return with_zeros(q, zeros)


STORED = [("float8", None), ("float8", 32), ("float8", 128), ("zeros", 32), ("zeros", 64), ("zeros", 128)]


@for_each_level
@pytest.mark.parametrize(("kind", "group"), STORED)
def test_8_bit_floats_and_zero_points_are_exact_to_rounding(level, kind, group):
    with library.use_level(level):
        for k in (33, 1100) if group is None else (group, 4224):
            x, w = map(np.asarray, arrays(17, k, max(ROWS), jnp.float32))
            q = stored(w, kind, group)
            exact = taken(x, q) @ np.asarray(dequantize(q), np.float64).T
            grid = native_grid([x[:m] for m in SIZES], first_rows(q))
            for n, outputs in zip(ROWS, grid, strict=True):
                for m, y in zip(SIZES, outputs, strict=True):
                    np.testing.assert_allclose(y, exact[:m, :n], rtol=1e-5, atol=2e-6 * k)
                    np.testing.assert_array_equal(y, outputs[-1][:m])  # a row does not depend on its batch


@pytest.mark.parametrize("size", [1e-42, 1e-20, 1e30])
def test_inputs_of_any_size_meet_zero_points(size):
    x, w = arrays(3, 384, 33, jnp.float32)
    x = size * x.at[0].set(0).at[1, 7].multiply(300)
    q = stored(w, "zeros", 128)
    y, exact = native(x, q), np.asarray(x, np.float64) @ np.asarray(dequantize(q), np.float64).T
    np.testing.assert_array_equal(y[0], 0)
    assert np.max(np.abs(y - exact) / np.maximum(np.abs(exact).max(axis=1, keepdims=True), 1e-30)) < 0.1


def test_every_8_bit_float_is_multiplied_exactly():
    codes = np.arange(256, dtype=np.uint8)
    values = jnp.asarray(codes[codes & 127 != 127].view(jnp.float8_e4m3fn))[:, None]
    q = ops.QuantizedWeight(values, jnp.ones((len(values), 1)), len(values), 1, None, 8)
    np.testing.assert_array_equal(native(jnp.ones((1, 1)), q)[0], values[:, 0].astype(jnp.float32))


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
@pytest.mark.parametrize("size", [0, 1e-42, 1e-36, 1e-20, 1e30])
def test_inputs_of_any_size_meet_quantised_weights(bits, group, size):
    x, w = arrays(3, 384, 33, jnp.float32)
    x = size * x.at[0].set(0).at[1, 7].multiply(300)  # a row of nothing, a row with an outlier
    q = quantize(w, bits, group)
    y, exact = native(x, q), np.asarray(x, np.float64) @ np.asarray(dequantize(q), np.float64).T
    np.testing.assert_array_equal(y[0], 0)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    assert np.max(np.abs(y - exact) / np.maximum(largest, 1e-30)) < (1e-2 if bits == 8 else 0.1)


def test_the_largest_integers_do_not_overflow():
    x, q = jnp.ones((8, 4096)), quantize(jnp.ones((16, 4096)), 8, None)
    np.testing.assert_allclose(native(x, q), 4096, rtol=1e-5)
    np.testing.assert_allclose(native(-x, q), -4096, rtol=1e-5)


@for_each_level
@pytest.mark.parametrize(("bits", "group"), SCHEMES)
@pytest.mark.parametrize(("k", "n"), [(384, 129), (1152, 80)])
def test_a_row_times_a_quantised_weight_does_not_depend_on_its_batch(level, bits, group, k, n):
    x, w = map(np.asarray, arrays(17, k, n, jnp.float32))
    q = quantize(w, bits, group)
    with library.use_level(level):
        whole = native(x, q)
        for m, y in enumerate(native_each([x[:m] for m in range(1, 17)], q), start=1):
            np.testing.assert_array_equal(y, whole[:m])


@for_each_level
@pytest.mark.parametrize(("bits", "group"), SCHEMES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_with_a_nan_or_infinity_is_not_finite_and_leaves_the_others_alone(level, bits, group, value):
    for m, n in ((3, 9), (11, 16)):
        x, w = arrays(m, 384, n, jnp.float32)
        q = quantize(w, bits, group)
        with library.use_level(level):
            alone, y = native(x, q), native(x.at[1, 383].set(value), q)
        assert not np.isfinite(y[1]).any()
        np.testing.assert_array_equal(y[::2], alone[::2])


@jax.jit
def together_and_alone(inputs, weights, biases):
    """Products of each input with several weights as one operation, and with each by itself."""
    with ops.use_implementations(linear="native", multi_linear="native"):
        return [
            (ops.multi_linear(x, weights, biases), [ops.linear(x, w, b) for w, b in zip(weights, biases, strict=True)])
            for x in inputs
        ]


@for_each_level
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int8 by 32", "int4", "float8", "zeros"])
def test_several_weights_give_what_each_gives_alone(level, kind):
    sizes = (1, 16, 17, 300)  # less than a piece of work, a whole one, two with a rest, many
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((n, 64)).astype(np.float32) for n in sizes]
    scheme = {"int8": (8, None), "int8 by 32": (8, 32), "int4": (4, 32)}.get(kind)
    weights = [
        quantize(w, *scheme) if scheme else stored(w, kind, 32) if kind in ("float8", "zeros") else w.astype(kind)
        for w in weights
    ]
    biases = [None, np.arange(16, dtype=np.float32), None, np.arange(300, dtype=np.float32)]
    inputs = [rng.standard_normal((m, 64)).astype(np.float32) for m in (0, 1, 3, 5, 17)]
    with library.use_level(level):
        for together, alone in together_and_alone(inputs, weights, biases):
            for y, expected in zip(together, alone, strict=True):
                np.testing.assert_array_equal(y, expected)


def test_weights_of_two_kinds_are_multiplied_one_by_one():
    x, w = arrays(2, 64, 32, jnp.bfloat16)
    other = w.astype(jnp.float32)
    assert ops.multi_linear.select(x, [w, w]).name == "native"
    assert ops.multi_linear.select(x, [w, other]).name == "reference"
    for y, weight in zip(ops.multi_linear(x, [w, other]), (w, other), strict=True):
        np.testing.assert_array_equal(y, ops.linear(x, weight))
