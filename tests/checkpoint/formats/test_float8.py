"""Checkpoints in 8-bit floats, with scales of blocks, rows and whole weights, and in MXFP4."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support.packing import float8, mxfp4, open_packed
from verax import ops
from verax.errors import CheckpointError

FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
ROWS = {"quant_method": "fbgemm_fp8"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
BLOCKS = {"config_groups": {"group_0": {"weights": {"block_structure": [128, 128], "strategy": "block"}}}}


SCALE = dict(name="weight_scale")
CASES = [
    (FINE, 300, 384, {}, "128x128", 128),
    (FINE, 40, 192, {}, "128x128", 64),  # blocks at the edges are not full
    (FINE, 40, 96, {}, "tensors", None),
    (FINE, 200, 256, dict(scale_dtype=ml_dtypes.bfloat16), "128x128", 128),
    (FINE, 7, 33, dict(SCALE, block=(None, None)), "tensors", None),
    (ROWS, 7, 33, dict(SCALE, block=(1, None)), "rows", None),
    (COMPRESSED, 7, 64, dict(SCALE, block=(1, None), scale_dtype=ml_dtypes.bfloat16), "rows", None),
    (COMPRESSED, 7, 64, dict(SCALE, block=(1, 32)), "32", 32),
    ({**COMPRESSED, **BLOCKS}, 200, 384, SCALE, "128x128", 128),
]


@pytest.mark.parametrize(("scheme", "F", "D", "case", "kind", "group"), CASES)
def test_the_weight_is_the_files(tmp_path, scheme, F, D, case, kind, group):
    arrays, expected = float8(np.random.default_rng(0), F, D, **case)
    opened = open_packed(tmp_path, {**arrays, "input_scale": np.ones(1, np.float32)}, scheme)
    assert opened.names() == ["up.weight"]
    weight = opened.read("up.weight")
    assert (weight.shape, weight.group_size) == ((F, D), group)
    assert weight.values.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(weight.values).view(np.uint8), arrays["weight"].view(np.uint8))
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=2**-24)
    assert kind in opened.kind("up.weight")


def test_every_8_bit_float_becomes_bfloat16_exactly(tmp_path):
    values = np.arange(256, dtype=np.uint8)
    values = values[values & 127 != 127].view(ml_dtypes.float8_e4m3fn)[None]
    opened = open_packed(tmp_path, {"weight": values, "weight_scale": np.ones((1, 1), np.float32)}, ROWS)
    np.testing.assert_array_equal(opened.read("up.weight").unscaled().astype(np.float32), values.astype(np.float32))


def test_scales_that_are_powers_of_two_may_be_exponents(tmp_path):
    arrays, _ = float8(np.random.default_rng(0), 7, 64, block=(1, 32), name="weight_scale")
    exponents = np.random.default_rng(1).integers(110, 130, (7, 2)).astype(np.uint8)
    weight = open_packed(tmp_path, {**arrays, "weight_scale": exponents}, COMPRESSED).read("up.weight")
    np.testing.assert_array_equal(weight.row_scales(), 2.0 ** (exponents.astype(np.float64) - 127))


@pytest.mark.parametrize("rows", [1, 3, 40, 300])
@pytest.mark.parametrize("case", [{}, dict(SCALE, block=(1, None)), dict(SCALE, block=(1, 32))], ids=str)
def test_products_agree_with_the_weight(tmp_path, case, rows):
    arrays, expected = float8(np.random.default_rng(0), 200, 384, **case)
    weight = open_packed(tmp_path, arrays, FINE).read("up.weight")
    x = np.random.default_rng(1).standard_normal((rows, 384)).astype(np.float32)
    y = jax.jit(ops.linear)(jnp.asarray(x), weight)
    assert np.linalg.norm(y - x @ expected.T) < 0.005 * np.linalg.norm(x @ expected.T)
    exact = np.asarray(x.astype(jnp.bfloat16), np.float64) @ expected.T
    np.testing.assert_allclose(ops.linear.reference(jnp.asarray(x), weight), exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("changes", "scheme", "says"),
    [
        ({"weight_scale_inv": None}, FINE, "up.weight has no up.weight_scale_inv or up.weight_scale with it"),
        ({"weight_scale_inv": np.ones((3, 3), np.float32)}, FINE, r"shape \[3, 3\]; supported are 8-bit floats"),
        ({"weight": np.ones((40, 384), ml_dtypes.float8_e5m2)}, FINE, "up.weight of dtype float8_e5m2"),
        ({}, {**FINE, "weight_block_size": [128, 48]}, "a scale for 32, 64, 128 inputs"),
        ({}, {**FINE, "weight_block_size": "128"}, "weight_block_size: expected"),
    ],
)
def test_what_cannot_be_computed_with_is_refused_by_name(tmp_path, changes, scheme, says):
    with pytest.raises(CheckpointError, match=says):
        open_packed(tmp_path, {**float8(np.random.default_rng(0), 40, 384)[0], **changes}, scheme)


def test_values_that_are_not_numbers_are_refused_when_they_are_read(tmp_path):
    arrays, _ = float8(np.random.default_rng(0), 40, 384)
    arrays["weight"][3, 5] = np.nan
    with pytest.raises(CheckpointError, match=r"up\.weight has values that are not numbers"):
        open_packed(tmp_path, arrays, FINE).read("up.weight")


@pytest.mark.parametrize(("F", "D"), [(7, 96), (33, 256)])
def test_an_mxfp4_weight_is_the_files_to_the_bit(tmp_path, F, D):
    arrays, expected = mxfp4(np.random.default_rng(0), F, D)
    opened = open_packed(tmp_path, arrays, MXFP4)
    assert opened.shape("up.weight") == (F, D)
    assert opened.kind("up.weight") == "MXFP4"
    np.testing.assert_array_equal(opened.read("up.weight").dequantize(), expected)


def test_exponents_beyond_the_range_of_float16_are_kept(tmp_path):
    arrays, _ = mxfp4(np.random.default_rng(0), 2, 64)
    arrays["weight_packed"][:] = 0x2F  # -6, 1
    arrays["weight_scale"][:] = [[60, 127], [180, 250]]
    weight = open_packed(tmp_path, arrays, MXFP4).read("up.weight").dequantize()
    np.testing.assert_array_equal(weight[:, ::32], -6 * 2.0 ** np.array([[-67, 0], [53, 123]]))
    np.testing.assert_array_equal(weight[:, 1::32], 2.0 ** np.array([[-67, 0], [53, 123]]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight_scale": np.ones((7, 4), np.uint8)}, r"up.weight_scale of dtype uint8 and shape \[7, 4\]; supported"),
        ({"weight_packed": np.ones((7, 72), np.uint8)}, "MXFP4 with an exponent"),
        ({"weight_global_scale": np.ones(1, np.float32)}, "NVFP4 is not supported; MXFP4, 8-bit floats and integers"),
    ],
)
def test_mxfp4_that_cannot_be_computed_with_is_refused_by_name(tmp_path, changes, says):
    with pytest.raises(CheckpointError, match=says):
        open_packed(tmp_path, {**mxfp4(np.random.default_rng(0), 7, 96)[0], **changes}, MXFP4)


def test_a_scale_that_is_not_a_number_is_refused_when_it_is_read(tmp_path):
    arrays, _ = mxfp4(np.random.default_rng(0), 7, 96)
    arrays["weight_scale"][2, 1] = 255
    with pytest.raises(CheckpointError, match=r"up\.weight_scale has values that are not numbers"):
        open_packed(tmp_path, arrays, MXFP4).read("up.weight")
