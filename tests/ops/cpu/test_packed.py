"""Products with packed weights at every level: equal to unpacked ones to the last bit, or within a stated bound."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import needs_library
from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.cpu import library
from verax.ops.packed import PackedWeight

pytestmark = needs_library

KINDS = ("float32", "bfloat16", "int8", "int8 by int8")
SHAPES = [(1, 32, 16), (7, 64, 48), (40, 416, 64), (200, 32, 80), (33, 800, 496), (0, 32, 16), (9, 3200, 96)]
"""More than one piece of K (384 to 1,536 values), block of rows (192), of columns (384); panels that are not full."""


def arrays(m, k, n, kind):
    rng = np.random.default_rng(0)
    x, w, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((m, k), (n, k), (n,)))
    if kind.startswith("int8"):
        return x, replace(ops.quantize(w, 8), rounds_inputs=kind == "int8 by int8"), bias
    return x, w.astype(kind), bias


def runs_here(kind):
    if kind == "int8" and library.has("bf16_tiles"):
        return False
    needed = {"bfloat16": ["bf16_dot"], "int8": ["half_dot"], "int8 by int8": ["byte_dot", "half_dot"]}
    return kind == "float32" or any(map(library.has, needed[kind]))


def pack(w, level):
    """Weight in the panels of a level."""
    with library.use_level(level):
        return PackedWeight.from_weight(w, 4 if library.has("byte_dot") else 2)


def _pairs():
    for level in library.levels():
        with library.use_level(level):
            yield from ((level, kind) for kind in KINDS if runs_here(kind))


each_level_and_kind = pytest.mark.parametrize(("level", "kind"), list(_pairs()))
"""Levels, with the kinds of packed weights that they multiply."""


@jax.jit
def product(x, w, bias=None):
    return ops.linear(x, w, bias)


@jax.jit
def unpacked_product(x, w, bias=None):
    with ops.use_implementations(linear="native_integers" if isinstance(w, ops.QuantizedWeight) else "native_gemm"):
        return ops.linear(x, w, bias)


UNIT = 2.0**-24
"""Unit roundoff of float32, u."""


def gamma(roundings):
    """Bound on the relative error of a product that passes through n roundings: n u / (1 - n u).

    Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1; it holds for sums in any order.
    """
    return roundings * UNIT / (1 - roundings * UNIT)


def difference_bound(x, w, bias):
    """Bound on the difference between sums by AMX's tiles and by vectors, float64 `[M, N]`.

    Products of two bfloat16 are exact in float32. A vector instruction adds each product to the sum: K roundings. A
    tile instruction adds 16 even and 16 odd products to two sums that begin at zero, adds these sums, and adds the
    result to the tile: 16 + 1 roundings, and K / 32 more. Adding the bias is one more in both.
    """
    x, w = (np.asarray(array.astype(jnp.bfloat16), np.float64) for array in (x, w))
    sizes = np.abs(x) @ np.abs(w).T + (0 if bias is None else np.abs(np.asarray(bias, np.float64)))
    K = x.shape[1]
    return (gamma(K + 1) + gamma(K / 32 + 18)) * sizes


def integer_product(x, w, bias):
    """Product in float64 of inputs, rounded to integers by 768, and 8-bit integers, and a bound on rounding."""
    y = np.zeros((len(x), len(w.values)))
    sizes = y.copy()
    for begin in range(0, x.shape[1], 768):
        part = np.asarray(x[:, begin : begin + 768])
        scale = np.abs(part).max(-1, keepdims=True) / np.float32(21845)
        factor = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 1e-37)
        product = np.rint(part * factor).astype(np.float64) @ np.asarray(w.values[:, begin : begin + 768], np.float64).T
        y += product * scale
        sizes += np.abs(product * scale)
    bias = 0 if bias is None else np.asarray(bias, np.float64)
    scales = np.asarray(w.scales[:, 0], np.float64)
    return y * scales + bias, 8 * UNIT * (sizes * scales + np.abs(bias))


def assert_product(got, x, w, bias=None, dtype=jnp.float32):
    """Assert that a packed product equals the unpacked one, as `ops.pack_weight` promises."""
    if isinstance(w, ops.QuantizedWeight) and not w.rounds_inputs:
        expected, bound = integer_product(x, w, bias)
        bound += (dtype != jnp.float32) * float(jnp.finfo(dtype).eps) * (np.abs(expected) + bound)
        assert np.all(np.abs(np.asarray(got, np.float64) - expected) <= bound)
        return
    expected = unpacked_product(x, w, bias)
    np.testing.assert_array_equal(got, expected.astype(dtype))
    by_tiles = not isinstance(w, ops.QuantizedWeight) and w.dtype == jnp.bfloat16 and library.has("bf16_tiles")
    if not by_tiles or "avx512_bf16" not in library.levels():
        return
    with library.use_level("avx512_bf16"):
        expected = unpacked_product(x, w, bias)
    bound = difference_bound(x, w, bias)
    if dtype != jnp.float32:  # both are rounded once more
        bound += float(jnp.finfo(dtype).eps) * (np.abs(np.asarray(expected, np.float64)) + bound)
    assert np.all(np.abs(np.asarray(got, np.float64) - np.asarray(expected.astype(dtype), np.float64)) <= bound)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("f", "d"), [(48, 32), (80, 64), (16, 128)])
def test_unpacking_gives_back_the_weight(kind, f, d):
    _, w, _ = arrays(1, d, f, kind)
    packed = PackedWeight.from_weight(w)
    assert packed.shape == (f, d)
    for got, wanted in zip(jax.tree.leaves(packed.unpacked()), jax.tree.leaves(w), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_single_rows_are_read_out_of_panels(kind):
    _, w, _ = arrays(1, 64, 80, kind)
    indices = jnp.asarray([[0, 47, 48], [79, 5, 5]])
    rows = jax.jit(PackedWeight.rows)(PackedWeight.from_weight(w), indices)
    assert rows.dtype == jnp.float32
    expected = w.dequantize() if kind.startswith("int8") else w.astype(jnp.float32)
    np.testing.assert_array_equal(rows, expected[indices])


@each_level_and_kind
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_a_product_equals_the_product_of_the_weight_that_was_packed(level, kind, m, k, n):
    x, w, bias = arrays(m, k, n, kind)
    packed = pack(w, level)
    with library.use_level(level):
        assert ops.linear.select(x, packed).name == "native_packed"
        assert_product(product(x, packed, bias), x, w, bias)
        assert_product(product(x, packed), x, w)


def test_a_level_that_cannot_multiply_a_packed_weight_says_so():
    x, w, _ = arrays(7, 64, 48, "bfloat16")
    with library.use_level(library.levels()[-1]):
        if runs_here("bfloat16"):
            pytest.skip("each level here multiplies them")
        with pytest.raises(Exception, match="packed for a level"):
            product(x, PackedWeight.from_weight(w)).block_until_ready()


@pytest.mark.parametrize("level", [level for level, kind in _pairs() if kind == "int8"])
def test_the_largest_sum_of_integers_fits_and_wrong_inputs_spoil_their_rows_only(level):
    weight = ops.QuantizedWeight.from_integers(jnp.full((48, 1536), -128), jnp.ones((48, 1)), 8, None)
    x = jnp.ones((4, 1536)).at[1, 3].set(jnp.nan).at[2, 900].set(-jnp.inf).at[3].set(0)
    with library.use_level(level):
        y = product(x, pack(weight, level))
    np.testing.assert_allclose(y[0], -128 * 1536, rtol=1e-6)
    assert np.all(np.isnan(y[1:3]))
    np.testing.assert_array_equal(y[3], 0)


@each_level_and_kind
def test_more_rows_than_memory_holds_at_a_time_and_several_weights(level, kind):
    x, w, bias = arrays(3000, 64, 48, kind)
    packed = pack(w, level)
    with library.use_level(level):
        together = jax.jit(ops.multi_linear)(x.reshape(2, 1500, 64), [packed, packed], [bias, None])
        for got, one_bias in zip(together, (bias, None), strict=True):
            assert got.shape == (2, 1500, 48)
            assert_product(got.reshape(3000, 48), x, w, one_bias)


@each_level_and_kind
@pytest.mark.parametrize(("m", "d", "f"), [(0, 32, 48), (3, 1056, 80), (300, 1600, 400)])
def test_results_are_rounded_to_the_dtypes_that_are_wanted(level, kind, m, d, f):
    x, w, bias = arrays(m, d, f, kind)
    packed, dtypes = [pack(w, level)] * 2, (jnp.float32, jnp.bfloat16)
    with library.use_level(level):
        assert ops.multi_linear.select(x, packed, [bias, None], dtypes).name == "native_packed"
        exact, rounded = jax.jit(lambda x: ops.multi_linear(x, packed, [bias, None], dtypes))(x)
        assert_product(exact, x, w, bias)
        assert_product(rounded, x, w, dtype=jnp.bfloat16)
        half = jax.jit(lambda x: ops.multi_linear(x, packed, None, (jnp.float16, jnp.float16)))(x)
        assert_product(half[0], x, w, dtype=jnp.float16)


@each_level_and_kind
def test_a_row_is_the_same_whatever_the_number_of_rows(level, kind):
    x, w, bias = arrays(300, 416, 96, kind)
    packed = pack(w, level)
    with library.use_level(level):
        whole = product(x, packed, bias)
        for rows in (1, 5, 33, 150):
            np.testing.assert_array_equal(product(x[:rows], packed, bias), whole[:rows])


@each_level_and_kind
@pytest.mark.parametrize(
    ("m", "d", "h", "f"), [(0, 32, 48, 16), (3, 64, 96, 48), (130, 1056, 80 * 32, 80), (777, 32, 96, 64)]
)
def test_an_mlp_is_two_products_with_a_gelu_between(level, kind, m, d, h, f):
    x, up, up_bias = arrays(m, d, h, kind)
    _, down, down_bias = arrays(m, h, f, kind)
    weights = pack(up, level), pack(down, level)
    with library.use_level(level):
        assert ops.gelu_mlp.select(x, *weights, up_bias, down_bias).name == "native_packed"
        got = jax.jit(ops.gelu_mlp)(x, *weights, up_bias, down_bias)
        hidden = jax.jit(ops.gelu)(product(x, weights[0], up_bias))
        np.testing.assert_array_equal(got, product(hidden, weights[1], down_bias))
        np.testing.assert_array_equal(jax.jit(ops.gelu_mlp)(x, *weights).shape, (m, f))
        approximate = jax.jit(partial(ops.gelu_mlp, approximate=True))(x, *weights, up_bias, down_bias)
        hidden = jax.nn.gelu(product(x, weights[0], up_bias), approximate=True)
        difference = np.linalg.norm(approximate - product(hidden, weights[1], down_bias))
        # Another rounding of tanh may round a hidden number to the next bfloat16 or integer.
        assert difference <= (1e-6 if kind == "float32" else 1e-3) * np.linalg.norm(approximate)


@each_level_and_kind
@pytest.mark.parametrize(("m", "d", "f"), [(0, 32, 48), (1, 64, 80), (130, 1056, 400), (3000, 32, 48)])
def test_swiglu_is_two_products_with_a_silu_of_one(level, kind, m, d, f):
    x, gate, gate_bias = arrays(m, d, f, kind)
    _, up, up_bias = arrays(m + 1, d, f, kind)
    weights = pack(gate, level), pack(up, level)
    with library.use_level(level):
        assert ops.swiglu.select(x, *weights, gate_bias, up_bias).name == "native_packed"
        got = jax.jit(ops.swiglu)(x, *weights, gate_bias, up_bias)
        gated, y = product(x, weights[0], gate_bias), product(x, weights[1], up_bias)
        np.testing.assert_allclose(got, jax.nn.silu(gated) * y, rtol=2e-6, atol=1e-6)
        assert jax.jit(ops.swiglu)(x.reshape(1, m, d), *weights).shape == (1, m, f)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_and_another_platform_take_packed_weights(kind):
    x, w, bias = arrays(7, 64, 48, kind)
    packed = PackedWeight.from_weight(w)
    np.testing.assert_array_equal(ops.linear.reference(x, packed, bias), ops.linear.reference(x, w, bias))
    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        assert ops.linear.select(x, packed).is_reference
        assert ops.pack_weight.select(w).is_reference


def test_weights_that_a_layout_would_change_are_refused():
    w = jnp.ones((48, 64))
    grouped = ops.quantize(w, 8, 32)
    others = [grouped, ops.quantize(w, 4, 32), ops.quantize(w, 8, is_float=True), w.astype(jnp.float16)]
    others += [replace(ops.quantize(w, 8), zeros=jnp.ones((48, 1), jnp.int8)), jnp.ones((48, 33), jnp.bfloat16)]
    for weight in others:
        with pytest.raises(InvalidParameterError, match=r"^weight: expected"):
            PackedWeight.from_weight(weight)


def test_packing_is_for_shapes_and_kinds_that_the_kernel_takes():
    with library.use_level(library.levels()[0]):
        chosen = {
            kind: isinstance(jax.jit(ops.pack_weight)(arrays(1, 64, 48, kind)[1]), PackedWeight) for kind in KINDS
        }
        assert chosen == {kind: runs_here(kind) and library.has("fma") for kind in KINDS}
    for weight in (jnp.zeros((47, 64)), jnp.zeros((48, 65)), jnp.zeros((48, 64), jnp.float16)):
        assert ops.pack_weight(weight) is weight
    grouped = ops.quantize(jnp.ones((48, 64)), 8, 32)
    assert ops.pack_weight(grouped) is grouped


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_it_can_be_differentiated(kind):
    if not runs_here(kind):
        pytest.skip("this machine has no bfloat16 dot products")
    x, w, bias = arrays(40, 64, 48, kind)
    mlp = tuple(PackedWeight.from_weight(arrays(1, *shape, kind)[1]) for shape in ((32, 96), (96, 16)))

    def loss(w, x, bias):
        y = ops.linear(x.reshape(2, 20, 64), w, bias)
        return jnp.sum(jnp.tanh(ops.gelu_mlp(y[..., :32], *mlp))) + jnp.sum(ops.swiglu(y[..., :32], mlp[0], mlp[0]))

    got = jax.jit(jax.grad(loss, (1, 2)))(PackedWeight.from_weight(w), x, bias)
    for one, wanted in zip(got, jax.jit(jax.grad(loss, (1, 2)))(w, x, bias), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=0.02, atol=0.02)
