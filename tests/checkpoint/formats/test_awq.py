"""AWQ checkpoints: every integer, scale and zero point of a file."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.packing import awq
from verax.checkpoint import Checkpoint
from verax.errors import CheckpointError

SCHEME = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def open_with(folder, arrays, **scheme):
    save_file({f"up.{name}": array for name, array in arrays.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {**SCHEME, **scheme}}))
    return Checkpoint.open(folder)


@pytest.mark.parametrize(("F", "D", "group"), [(40, 384, 128), (8, 96, 32), (24, 128, 64), (16, 320, 320)])
def test_the_weight_is_the_files_to_the_bit(tmp_path, F, D, group):
    arrays, expected = awq(np.random.default_rng(0), F, D, group=group)
    opened = open_with(tmp_path, arrays, group_size=group)
    assert opened.names() == ["up.weight"]
    assert opened.shape("up.weight") == (F, D)
    # Integers times float16 scales are exact in float32.
    np.testing.assert_array_equal(opened.read("up.weight").dequantize(), expected)


def test_the_kind_says_bits_and_groups(tmp_path):
    assert open_with(tmp_path, awq(np.random.default_rng(0), 40, 384)[0]).kind("up.weight") == "AWQ int4 by 32"


@pytest.mark.parametrize(
    ("changes", "scheme", "says"),
    [
        ({}, {"version": "GEMV"}, "the version 'GEMV' are not supported: gemm is"),
        ({}, {"bits": 8}, "8 bits are not supported: 4 are"),
        ({}, {"version": 3}, "version: expected a text"),
        ({"scales": None}, {}, "up.qweight has no up.scales with it"),
        ({"qzeros": np.zeros((12, 4), np.int32)}, {}, r"up.qzeros of dtype int32 and shape \[12, 4\]"),
        ({"qweight": np.zeros((384, 5), np.float32)}, {}, "the first two of int32"),
    ],
)
def test_what_cannot_be_computed_with_is_refused_by_name(tmp_path, changes, scheme, says):
    arrays = {**awq(np.random.default_rng(0), 40, 384)[0], **changes}
    with pytest.raises(CheckpointError, match=says):
        open_with(tmp_path, {name: array for name, array in arrays.items() if array is not None}, **scheme)
