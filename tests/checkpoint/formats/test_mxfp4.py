"""MXFP4 checkpoints: every 4-bit float times its power of two."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.packing import mxfp4
from verax.checkpoint import Checkpoint
from verax.errors import CheckpointError


def open_with(folder, arrays):
    save_file({f"up.{name}": array for name, array in arrays.items()}, folder / "model.safetensors")
    scheme = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    return Checkpoint.open(folder)


@pytest.mark.parametrize(("F", "D"), [(7, 96), (33, 256)])
def test_the_weight_is_the_files_to_the_bit(tmp_path, F, D):
    arrays, expected = mxfp4(np.random.default_rng(0), F, D)
    opened = open_with(tmp_path, arrays)
    assert opened.shape("up.weight") == (F, D)
    assert opened.kind("up.weight") == "MXFP4"
    np.testing.assert_array_equal(opened.read("up.weight").dequantize(), expected)


def test_exponents_beyond_those_of_float16_are_kept(tmp_path):
    arrays, _ = mxfp4(np.random.default_rng(0), 2, 64)
    arrays["weight_packed"][:] = 0x2F  # -6, 1
    arrays["weight_scale"][:] = [[60, 127], [180, 250]]
    weight = open_with(tmp_path, arrays).read("up.weight").dequantize()
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
def test_what_cannot_be_computed_with_is_refused_by_name(tmp_path, changes, says):
    with pytest.raises(CheckpointError, match=says):
        open_with(tmp_path, {**mxfp4(np.random.default_rng(0), 7, 96)[0], **changes})


def test_a_scale_that_is_not_a_number_is_refused_when_it_is_read(tmp_path):
    arrays, _ = mxfp4(np.random.default_rng(0), 7, 96)
    arrays["weight_scale"][2, 1] = 255
    with pytest.raises(CheckpointError, match=r"up\.weight_scale has values that are not numbers"):
        open_with(tmp_path, arrays).read("up.weight")
