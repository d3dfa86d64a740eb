"""GPTQ and AWQ checkpoints: every integer, scale and zero point of a file, in the order of the inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.packing import awq, gptq, open_packed
from verax import ops
from verax.errors import CheckpointError

SCHEME = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def open_with(folder, arrays, **scheme):
    return open_packed(folder, arrays, {**SCHEME, **scheme})


CASES = [
    dict(),
    dict(group=64, bits=8),
    dict(group=128, symmetric=False),
    dict(act_order=True),
    dict(act_order=True, symmetric=False, group=64),
    dict(bits=8, symmetric=False, act_order=True),
    dict(g_idx=False),
    dict(symmetric=False, version=2),
    dict(group=384),  # one for a row
    dict(group=384, bits=8, symmetric=False),
    dict(group=192),  # of no size that is computed with: becomes three of 64
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_weight_is_the_files_to_the_bit(tmp_path, case):
    arrays, expected = gptq(np.random.default_rng(0), 40, 384, **case)
    opened = open_with(tmp_path, arrays, checkpoint_format="gptq_v2" if case.get("version") == 2 else "gptq")
    assert opened.names() == ["up.weight"]
    assert opened.shape("up.weight") == (40, 384)
    weight = opened.read("up.weight")
    assert weight.bits == case.get("bits", 4)
    assert (weight.zeros is None) == case.get("symmetric", True)
    assert (weight.order is None) == (not case.get("act_order"))
    # Integers times float16 scales are exact in float32.
    np.testing.assert_array_equal(weight.dequantize(), expected)


def test_zero_points_of_zero_survive_the_first_versions_minus_one(tmp_path):
    # GPTQModel takes one off the whole word, with a borrow between codes: all zeros are -0x11111111.
    arrays, _ = gptq(np.random.default_rng(0), 8, 64, symmetric=False)
    words = np.array([[0x00000000], [0x0F010070]], np.uint32)
    arrays["qzeros"] = (words - np.uint32(0x11111111)).view(np.int32)
    zeros = open_with(tmp_path, arrays).read("up.weight").row_zeros()
    np.testing.assert_array_equal(zeros.T + 8, [[0] * 8, [0, 7, 0, 0, 1, 0, 15, 0]])


@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("case", [dict(act_order=True), dict(symmetric=False), dict(bits=8, symmetric=False)], ids=str)
def test_products_agree_with_the_weight(tmp_path, case, rows):
    arrays, expected = gptq(np.random.default_rng(0), 40, 384, **case)
    weight = open_with(tmp_path, arrays).read("up.weight")
    x = np.random.default_rng(1).standard_normal((rows, 384)).astype(np.float32)
    y = jax.jit(ops.linear)(jnp.asarray(x), weight)
    # Rounding of x to 8 bits for 4-bit weights where the processor multiplies integers, else of both to bfloat16.
    assert np.linalg.norm(y - x @ expected.T) < 0.01 * np.linalg.norm(x @ expected.T)
    exact = np.asarray(x.astype(jnp.bfloat16), np.float64) @ expected.T
    np.testing.assert_allclose(ops.linear.reference(jnp.asarray(x), weight), exact, atol=1e-5 * np.abs(exact).max())


def test_a_group_index_of_zeros_is_none(tmp_path):
    arrays, expected = gptq(np.random.default_rng(0), 40, 384)
    arrays["g_idx"][:] = 0
    np.testing.assert_array_equal(open_with(tmp_path, arrays).read("up.weight").dequantize(), expected)


def test_the_kind_says_bits_and_groups(tmp_path):
    opened = open_with(tmp_path, gptq(np.random.default_rng(0), 40, 384, group=64)[0])
    assert opened.kind("up.weight") == "GPTQ int4 by 64"


@pytest.mark.parametrize(
    ("case", "changes", "scheme", "says"),
    [
        ({}, {}, {"bits": 3}, "3 bits are not supported: 4 and 8 are"),
        ({}, {}, {"bits": "4"}, "bits: expected a whole number"),
        ({}, {}, {"checkpoint_format": "marlin"}, "'marlin' are not supported: gptq and gptq_v2 are"),
        ({}, {"qzeros": None}, {}, "up.qweight has no up.qzeros with it"),
        ({}, {"scales": np.ones((3, 40), np.float16)}, {}, r"up.scales of dtype float16 and shape \[3, 40\]"),
        ({}, {"scales": np.ones((12, 40), np.int32)}, {}, "the last of floats"),
        ({}, {"qweight": np.zeros(48, np.int32)}, {}, r"up.qweight of dtype int32 and shape \[48\]"),
        ({}, {"g_idx": np.zeros(383, np.int32)}, {}, r"up.g_idx of dtype int32 and shape \[383\]"),
        (dict(group=16), {}, {}, "a scale for 32, 64, 128 inputs or a multiple of them, or one for a row"),
    ],
)
def test_what_cannot_be_computed_with_is_refused_by_name(tmp_path, case, changes, scheme, says):
    with pytest.raises(CheckpointError, match=says):
        open_with(tmp_path, {**gptq(np.random.default_rng(0), 40, 384, **case)[0], **changes}, **scheme)


def test_groups_of_several_sizes_are_refused_when_they_are_read(tmp_path):
    arrays, _ = gptq(np.random.default_rng(0), 40, 384)
    arrays["g_idx"][5] = 11
    with pytest.raises(CheckpointError, match=r"up\.g_idx does not give each of 12 groups"):
        open_with(tmp_path, arrays).read("up.weight")


@pytest.mark.parametrize(("F", "D", "group"), [(40, 384, 128), (8, 96, 32), (24, 128, 64), (16, 320, 320)])
def test_an_awq_weight_is_the_files_to_the_bit(tmp_path, F, D, group):
    arrays, expected = awq(np.random.default_rng(0), F, D, group=group)
    opened = open_packed(tmp_path, arrays, {**AWQ, "group_size": group})
    assert opened.names() == ["up.weight"]
    assert opened.shape("up.weight") == (F, D)
    assert opened.kind("up.weight") == f"AWQ int4 by {'rows' if group == D else group}"
    # Integers times float16 scales are exact in float32.
    np.testing.assert_array_equal(opened.read("up.weight").dequantize(), expected)


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
def test_awq_that_cannot_be_computed_with_is_refused_by_name(tmp_path, changes, scheme, says):
    with pytest.raises(CheckpointError, match=says):
        open_packed(tmp_path, {**awq(np.random.default_rng(0), 40, 384)[0], **changes}, {**AWQ, **scheme})
