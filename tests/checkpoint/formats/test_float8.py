"""Checkpoints in 8-bit floats: values and scales of blocks, rows and whole weights."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.packing import float8
from verax import ops
from verax.checkpoint import Checkpoint
from verax.errors import CheckpointError

FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
ROWS = {"quant_method": "fbgemm_fp8"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BLOCKS = {"config_groups": {"group_0": {"weights": {"block_structure": [128, 128], "strategy": "block"}}}}


def open_with(folder, arrays, scheme):
    save_file({f"up.{name}": array for name, array in arrays.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    return Checkpoint.open(folder)


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
    opened = open_with(tmp_path, {**arrays, "input_scale": np.ones(1, np.float32)}, scheme)
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
    opened = open_with(tmp_path, {"weight": values, "weight_scale": np.ones((1, 1), np.float32)}, ROWS)
    np.testing.assert_array_equal(opened.read("up.weight").unscaled().astype(np.float32), values.astype(np.float32))


def test_scales_that_are_powers_of_two_may_be_exponents(tmp_path):
    arrays, _ = float8(np.random.default_rng(0), 7, 64, block=(1, 32), name="weight_scale")
    exponents = np.random.default_rng(1).integers(110, 130, (7, 2)).astype(np.uint8)
    weight = open_with(tmp_path, {**arrays, "weight_scale": exponents}, COMPRESSED).read("up.weight")
    np.testing.assert_array_equal(weight.row_scales(), 2.0 ** (exponents.astype(np.float64) - 127))


@pytest.mark.parametrize("rows", [1, 3, 40, 300])
@pytest.mark.parametrize("case", [{}, dict(SCALE, block=(1, None)), dict(SCALE, block=(1, 32))], ids=str)
def test_products_agree_with_the_weight(tmp_path, case, rows):
    arrays, expected = float8(np.random.default_rng(0), 200, 384, **case)
    weight = open_with(tmp_path, arrays, FINE).read("up.weight")
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
    arrays = {**float8(np.random.default_rng(0), 40, 384)[0], **changes}
    with pytest.raises(CheckpointError, match=says):
        open_with(tmp_path, {name: array for name, array in arrays.items() if array is not None}, scheme)


def test_values_that_are_not_numbers_are_refused_when_they_are_read(tmp_path):
    arrays, _ = float8(np.random.default_rng(0), 40, 384)
    arrays["weight"][3, 5] = np.nan
    with pytest.raises(CheckpointError, match=r"up\.weight has values that are not numbers"):
        open_with(tmp_path, arrays, FINE).read("up.weight")
