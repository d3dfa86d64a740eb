"""Quantised weights: what is stored stands for the weight, and the implementations of `linear` agree about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.errors import InvalidParameterError

SCHEMES = [(8, None), (8, 32), (8, 64), (8, 128), (4, 32), (4, 64), (4, 128)]
# Relative error of Gaussian weights: about 1 / (sqrt(12) * levels per standard deviation), with room.
LARGEST_ERROR = {(8, None): 0.010, (8, 32): 0.006, (8, 64): 0.0065, (8, 128): 0.007}
LARGEST_ERROR |= {(4, 32): 0.095, (4, 64): 0.105, (4, 128): 0.115}


def gaussian(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
def test_the_error_is_the_rounding_to_the_bits(bits, group):
    w = gaussian(64, 512)
    error = ops.quantize(w, bits, group).dequantize() - w
    assert jnp.linalg.norm(error) / jnp.linalg.norm(w) < LARGEST_ERROR[bits, group]


@pytest.mark.parametrize("unsigned", ["integers", "zeros"])
def test_codes_without_a_sign_are_refused(unsigned):
    arrays = {"integers": jnp.full((16, 32), 7, jnp.int8), "zeros": jnp.zeros((16, 1), jnp.int8)}
    arrays[unsigned] = arrays[unsigned].astype(jnp.uint8)
    with pytest.raises(InvalidParameterError, match=f"{unsigned}: expected signed integers"):
        ops.QuantizedWeight.from_integers(scales=jnp.ones((16, 1)), bits=8, group_size=32, **arrays)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "wrong",
    [
        {"scales": jnp.ones((16, 1))},
        {"scales": jnp.ones((16, 2), jnp.bfloat16)},
        {"zeros": jnp.zeros((16, 1), jnp.int8)},
        {"order": jnp.arange(32)},
    ],
    ids=lambda wrong: "".join(wrong),
)
def test_scales_zeros_and_orders_that_do_not_fit_are_refused(wrong):
    arrays = {"integers": jnp.zeros((16, 64), jnp.int8), "scales": jnp.ones((16, 2)), "bits": 8, "group_size": 32}
    with pytest.raises(InvalidParameterError, match=f"^{next(iter(wrong))}: expected"):
        ops.QuantizedWeight.from_integers(**arrays | wrong)


def test_packing_is_undone_for_every_value_and_a_last_block_that_is_not_full():
    integers = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (37, 160)), jnp.int8)
    scales = gaussian(37, 5).astype(jnp.float16)
    q = ops.QuantizedWeight.from_integers(integers, scales, 4, 32)
    assert q.values.shape == (3, 20, 32)
    assert int(q.values[1, 7, 2 * 3 + 1]) == sum(
        (int(integers[16 + 3, 8 * 7 + 2 * j + 1]) + 8) << 4 * j for j in range(4)
    )
    np.testing.assert_array_equal(q.integers(), integers)
    np.testing.assert_array_equal(q.row_scales(), scales)
    np.testing.assert_array_equal(q.dequantize(), integers * np.repeat(np.asarray(scales, np.float32), 32, axis=1))


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
def test_a_weight_of_zeros_stays_one(bits, group):
    np.testing.assert_array_equal(ops.quantize(jnp.zeros((3, 128)), bits, group).dequantize(), np.zeros((3, 128)))


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
def test_many_rows_agree_with_the_reference(bits, group):
    x, q, bias = gaussian(1100, 256, seed=1), ops.quantize(gaussian(24, 256), bits, group), gaussian(24)
    y = jax.jit(ops.linear.implementations["dequantized"].function)(x, q, bias)
    # Scales of groups go into bfloat16 weights here, which rounds each product by up to 2^-9: 0.02 in the mean here.
    np.testing.assert_allclose(y, ops.linear.reference(x, q, bias), rtol=1e-5, atol=1e-4 if group is None else 0.2)


def random_weight(bits, zeros, order, F=37, D=192, group=64):
    """Weight of random integers, with all that a checkpoint may add; and what it stands for, float64."""
    rng = np.random.default_rng(0)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    integers = rng.integers(low, high, (F, D))
    scales = rng.standard_normal((F, D // group)).astype(np.float16) / high
    points = rng.integers(low, high, scales.shape) if zeros else np.zeros(scales.shape, np.int64)
    by_input = rng.permutation(D) if order else np.arange(D)
    columns = (integers - np.repeat(points, group, 1)) * np.repeat(scales.astype(np.float64), group, 1)
    weight = ops.QuantizedWeight.from_integers(
        jnp.asarray(integers),
        jnp.asarray(scales),
        bits,
        group,
        jnp.asarray(points) if zeros else None,
        jnp.asarray(by_input) if order else None,
    )
    return weight, columns[:, np.argsort(by_input)]


@pytest.mark.parametrize(("zeros", "order"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("bits", [8, 4])
def test_zero_points_and_an_order_of_inputs_are_part_of_the_weight(bits, zeros, order):
    weight, expected = random_weight(bits, zeros, order)
    np.testing.assert_array_equal(weight.dequantize(), expected)
    assert np.abs(weight.unscaled().astype(jnp.float32)).max() > 2 ** (bits - 2)
    for rows in (1, 7, 150):
        x = gaussian(rows, 192, seed=3)
        y = jax.jit(ops.linear)(x, weight)
        assert np.linalg.norm(y - np.asarray(x) @ expected.T) < 0.01 * np.linalg.norm(np.asarray(x) @ expected.T)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 64)])
@pytest.mark.parametrize(("zeros", "order"), [(False, False), (True, False), (True, True)])
def test_single_rows_are_those_of_the_whole_weight(bits, group, zeros, order):
    rng = np.random.default_rng(0)
    low, shape = -(1 << (bits - 1)), (37, 128 // (group or 128))
    weight = ops.QuantizedWeight.from_integers(
        jnp.asarray(rng.integers(low, -low, (37, 128)), jnp.int8),
        gaussian(*shape),
        bits,
        group,
        jnp.asarray(rng.integers(low // 2, -low // 2, shape)) if zeros else None,
        jnp.asarray(rng.permutation(128)) if order else None,
    )
    chosen = jnp.asarray([[3, 36], [0, 16], [3, 15]])
    np.testing.assert_array_equal(jax.jit(lambda w: w.rows(chosen))(weight), weight.dequantize()[chosen])


def test_no_rows_are_taken_of_a_table():
    table, none = jax.ShapeDtypeStruct((48, 128), jnp.float32), jax.ShapeDtypeStruct((2, 0), jnp.int32)
    quantised = [jax.eval_shape(lambda w, scheme=scheme: ops.quantize(w, *scheme), table) for scheme in SCHEMES]
    blocks = [ops.BlockQuantizedWeight.shapes(kind, 48, 128) for kind in ops.BLOCK_KINDS]
    for weight in (*quantised, *blocks, jax.eval_shape(ops.PackedWeight.from_weight, table)):
        rows = jax.eval_shape(lambda weight, none: weight.rows(none), weight, none)
        assert (rows.shape, rows.dtype) == ((2, 0, 128), jnp.float32)


def test_products_of_one_input_with_weights_in_several_orders():
    (a, exact_a), (b, exact_b) = random_weight(4, True, True), random_weight(4, False, False)
    x = gaussian(3, 192)
    for y, exact in zip(jax.jit(ops.multi_linear)(x, [a, b]), (exact_a, exact_b), strict=True):
        assert np.linalg.norm(y - np.asarray(x) @ exact.T) < 0.01 * np.linalg.norm(np.asarray(x) @ exact.T)


@pytest.mark.parametrize(
    ("bits", "group", "named"), [(3, 32, "bits"), (4, None, "group_size"), (4, 48, "group_size"), (8, 128, "divide")]
)
def test_other_schemes_are_refused_by_name(bits, group, named):
    with pytest.raises(InvalidParameterError, match=named):
        ops.quantize(jnp.ones((2, 64)), bits, group)


@pytest.mark.parametrize("weight", [jnp.ones(64), jnp.ones((2, 2, 64)), jnp.ones((0, 64)), jnp.ones((2, 64), int)])
def test_only_matrices_of_floats_are_quantised(unchecked, weight):
    with pytest.raises(InvalidParameterError, match=r"^weight: expected floats"):
        ops.quantize(weight, 8)
