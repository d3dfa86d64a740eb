"""Quantised checkpoints: each weight is the file's to the bit, and what cannot be computed with is refused."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tests.support.packing import awq, dequantized, float8, gptq, mxfp4, open_packed, pack_rows, random_codes
from tests.support.tiny import random_weights, tiny_config
from verax import checkpoint
from verax.checkpoint import Checkpoint, load_module
from verax.errors import CheckpointError, InvalidParameterError
from verax.loading import load_causal_lm
from verax.nn import Linear
from verax.ops.quantized import QuantizedWeight, quantize

COMPRESSED = {"quant_method": "compressed-tensors"}
SCALE = dict(name="weight_scale")
FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
ROWS = {"quant_method": "fbgemm_fp8"}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
BLOCKS = {"config_groups": {"group_0": {"weights": {"block_structure": [128, 128], "strategy": "block"}}}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


class Model(nnx.Module):
    def __init__(self, size_in, rngs, bias=True):
        self.up = Linear(size_in, 5, bias=bias, dtype=jnp.bfloat16, rngs=rngs)


def abstract(size_in):
    return nnx.eval_shape(lambda: Model(size_in, nnx.Rngs(0)))


def random_model(size_in, bits, group_size):
    model = Model(size_in, nnx.Rngs(0))
    kernel = jax.random.normal(jax.random.key(1), (5, size_in)) * jnp.exp(jnp.arange(5.0))[:, None]
    model.up.weight.set_value(quantize(kernel, bits, group_size))
    return model


def same(a, b):
    assert isinstance(b, QuantizedWeight)
    assert (a.bits, a.group_size, a.shape) == (b.bits, b.group_size, b.shape)
    np.testing.assert_array_equal(a.integers(), b.integers())
    np.testing.assert_array_equal(a.values, b.values)
    np.testing.assert_array_equal(np.asarray(a.scales, np.float32), np.asarray(b.scales, np.float32))


@pytest.mark.parametrize(
    ("bits", "group_size", "size_in"),
    [(8, None, 33), (8, None, 1), (8, 32, 96), (4, 32, 96), (4, 128, 384), (4, 64, 64)],
)
def test_saving_and_loading_gives_the_same_integers_and_scales(tmp_path, bits, group_size, size_in):
    model = random_model(size_in, bits, group_size)
    folder = checkpoint.save(model, tmp_path, config={"a": 1})
    opened = Checkpoint.open(folder)
    assert sorted(opened.names()) == ["up.bias", "up.weight"]
    loaded = load_module(abstract(size_in), opened, dtype=jnp.bfloat16)
    same(model.up.weight.get_value(), loaded.up.weight.get_value())
    floats = load_module(abstract(size_in), opened, dtype=jnp.float32, dequantize=lambda name: name == "up.weight")
    assert floats.up.weight[...].dtype == jnp.float32
    np.testing.assert_array_equal(floats.up.weight[...], model.up.weight.get_value().dequantize())
    assert opened.config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == bits


def test_scales_that_float16_cannot_hold_stay_float32(tmp_path):
    scales = np.asarray([[1e-6, 1.0]], np.float32)
    tensors = {"weight_packed": np.zeros((1, 8), np.int32), "weight_scale": scales, "weight_shape": np.asarray([1, 64])}
    np.testing.assert_array_equal(open_packed(tmp_path, tensors, COMPRESSED).read("up.weight").row_scales(), scales)


def test_zero_points_and_activation_order_are_read(tmp_path):
    # By the format's description: zero points packed along the rows, and the group of each input.
    rng = np.random.default_rng(0)
    codes, zeros, scales = random_codes(rng, 5, 96, 32, 4, False)
    g_idx = rng.permutation(np.arange(96) // 32)
    tensors = {
        "weight_packed": np.ascontiguousarray(pack_rows(codes.T, 4).T).view(np.int32),
        "weight_zero_point": pack_rows(np.pad(zeros, ((0, 3), (0, 0))), 4).view(np.int32),
        "weight_scale": scales,
        "weight_shape": np.asarray([5, 96]),
        "weight_g_idx": g_idx.astype(np.int32),
    }
    weight = open_packed(tmp_path, tensors, COMPRESSED).read("up.weight")
    np.testing.assert_array_equal(weight.dequantize(), dequantized(codes, zeros, scales, g_idx))


@pytest.mark.parametrize("zeros", [{}, {"weight_zero_point": np.array([[-100], [5]], np.int8)}])
def test_eight_bits_without_packing_are_read_too_and_may_have_zero_points(tmp_path, zeros):
    integers, scales = np.array([[-128, 127], [3, 4]], np.int8), np.asarray([[0.5], [2.0]], np.float32)
    weight = open_packed(tmp_path, {"weight": integers, "weight_scale": scales, **zeros}, COMPRESSED).read("up.weight")
    expected = (integers.astype(np.int32) - zeros.get("weight_zero_point", 0)) * scales
    np.testing.assert_array_equal(weight.dequantize(), expected)


TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
NONE = {"weight_zero_point": np.array([[0], [0]], np.int8)}


@pytest.mark.parametrize(
    ("rounds", "targets", "inputs", "more"),
    [
        (True, ["Linear"], TOKENS, {}),
        (True, ["Linear"], {"dynamic": True, "strategy": "token"}, NONE),
        (True, ["re:u.$"], TOKENS, {}),
        (False, ["re:up.+"], TOKENS, {}),
        (True, ["up"], TOKENS, {}),
        (False, ["Linear"], None, {}),
        (False, ["Linear"], TOKENS | {"dynamic": False}, {}),
        (False, ["Linear"], TOKENS | {"strategy": "tensor"}, {}),
        (False, ["Linear"], TOKENS | {"symmetric": False}, {}),
        (False, ["Linear"], TOKENS | {"type": "float"}, {}),
        (False, ["Linear"], TOKENS, {"weight_zero_point": np.array([[-100], [5]], np.int8)}),
    ],
)
def test_weights_round_their_inputs_where_the_configuration_has_a_scale_for_each_token(
    tmp_path, rounds, targets, inputs, more
):
    groups = {"group_0": {"targets": targets, "weights": {"num_bits": 8}, "input_activations": inputs}}
    integers, scales = np.array([[-128, 127], [3, 4]], np.int8), np.asarray([[0.5], [2.0]], np.float32)
    stored = {"weight": integers, "weight_scale": scales, **more}
    weight = open_packed(tmp_path, stored, COMPRESSED | {"config_groups": groups}).read("up.weight")
    assert weight.rounds_inputs == rounds
    np.testing.assert_array_equal(weight.values, integers)


@pytest.mark.parametrize("named", [["up"], ["re:u."]])
@pytest.mark.parametrize("rounds", [True, False])
def test_a_group_that_names_a_layer_is_preferred_to_that_of_all_layers(tmp_path, named, rounds):
    of_layer, of_all = (TOKENS, None) if rounds else (None, TOKENS)
    groups = {
        "all": {"targets": ["Linear"], "weights": {}, "input_activations": of_all},
        "one": {"targets": named, "weights": {}, "input_activations": of_layer},
    }
    stored = {"weight": np.ones((2, 2), np.int8), "weight_scale": np.ones((2, 1), np.float32)}
    weight = open_packed(tmp_path, stored, COMPRESSED | {"config_groups": groups}).read("up.weight")
    assert weight.rounds_inputs == rounds


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_eight_bits_may_have_one_scale(tmp_path, shape):
    integers = np.array([[-128, 127], [3, 4]], np.int8)
    stored = {"weight": integers, "weight_scale": np.full(shape, 0.5, np.float32)}
    np.testing.assert_array_equal(
        open_packed(tmp_path, stored, COMPRESSED).read("up.weight").dequantize(), integers / 2
    )


def test_modelopts_8_bit_floats_are_read_and_other_algorithms_refused(tmp_path):
    arrays, expected = float8(np.random.default_rng(0), 8, 64, block=(1, None), name="weight_scale")
    arrays["input_scale"] = np.ones((), np.float32)
    opened = open_packed(tmp_path, arrays, {"quant_method": "modelopt", "quant_algo": "FP8"})
    np.testing.assert_allclose(opened.read("up.weight").dequantize(), expected, rtol=1e-7)
    assert opened.names() == ["up.weight"]
    with pytest.raises(CheckpointError, match="quant_algo 'NVFP4' of ModelOpt is not supported: FP8 is"):
        open_packed(tmp_path, arrays, {"quant_method": "modelopt", "quant_algo": "NVFP4"})


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        ({"compression_config": COMPRESSED}, None),
        ({"text_config": {"quantization_config": COMPRESSED}}, None),
        ({}, ("quantize_config.json", {"bits": 4, "group_size": 32})),
        ({}, ("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})),
        ({}, ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})),
    ],
)
def test_the_scheme_may_be_in_other_places(tmp_path, config, beside):
    stored = PACKED
    if beside is not None:
        name, scheme = beside
        makers = {"quantize_config.json": gptq, "quant_config.json": awq}
        make = makers.get(name, partial(float8, block=(1, None), name="weight_scale"))
        stored, _ = make(np.random.default_rng(0), 16, 64)
        (tmp_path / name).write_text(json.dumps(scheme))
    save_file({f"up.{last}": array for last, array in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert isinstance(Checkpoint.open(tmp_path).read("up.weight"), QuantizedWeight)


def test_experts_of_other_magnitudes_than_the_first_are_the_files(tmp_path):
    sizes = dict(num_experts=2, num_experts_per_tok=2, moe_intermediate_size=64, num_hidden_layers=1)
    config, rng, expected = tiny_config("qwen3_moe", **sizes), np.random.default_rng(0), []
    stored = {key: weight for key, weight in random_weights(config).items() if "experts" not in key}
    for expert, smaller in ((0, 0), (1, 24)):
        for name in ("gate_proj", "up_proj", "down_proj"):
            arrays, weight = mxfp4(rng, 64, 64)
            arrays["weight_scale"] -= np.uint8(smaller)
            stored |= {f"model.layers.0.mlp.experts.{expert}.{name}.{last}": one for last, one in arrays.items()}
            expected += [weight * 2.0**-smaller] if name == "down_proj" else []
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    model = load_causal_lm(Checkpoint.open(tmp_path), dtype="float32")
    stack = model.model.layers[0].mlp.experts.down_proj.get_value()
    for i, weight in enumerate(expected):
        np.testing.assert_array_equal(jax.tree.map(lambda array, i=i: array[i], stack).dequantize(), weight)


def test_targets_that_are_no_regular_expression_are_refused(tmp_path):
    stored = {"weight": np.ones((2, 2), np.int8), "weight_scale": np.ones((2, 1), np.float32)}
    groups = {"group_0": {"targets": ["re:("], "weights": {}, "input_activations": TOKENS}}
    with pytest.raises(CheckpointError, match=r"targets: 're:\(' is not a regular expression"):
        open_packed(tmp_path, stored, COMPRESSED | {"config_groups": groups})


def test_weights_that_round_their_inputs_are_saved_so(tmp_path):
    model = random_model(33, 8, None)
    model.up.weight.set_value(replace(model.up.weight.get_value(), rounds_inputs=True))
    loaded = load_module(abstract(33), Checkpoint.open(checkpoint.save(model, tmp_path, config={})), dtype=jnp.bfloat16)
    same(model.up.weight.get_value(), loaded.up.weight.get_value())
    assert loaded.up.weight.get_value().rounds_inputs


def test_a_bias_of_zeros_that_the_model_lacks_is_left_out(tmp_path):
    size_in = 33
    folder = checkpoint.save(random_model(size_in, 8, None), tmp_path, config={})
    without = nnx.eval_shape(lambda: Model(size_in, nnx.Rngs(0), bias=False))
    load_module(without, Checkpoint.open(folder), dtype=jnp.bfloat16)
    model = random_model(size_in, 8, None)
    model.up.bias[3] = 1
    folder = checkpoint.save(model, tmp_path, config={})
    with pytest.raises(CheckpointError, match=r"up\.bias unexpected"):
        load_module(without, Checkpoint.open(folder), dtype=jnp.bfloat16)


FLOAT_CASES = [
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


@pytest.mark.parametrize(("scheme", "F", "D", "case", "kind", "group"), FLOAT_CASES)
def test_a_float8_weight_is_the_files(tmp_path, scheme, F, D, case, kind, group):
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


def test_exponents_beyond_the_range_of_float16_are_kept(tmp_path):
    arrays, _ = mxfp4(np.random.default_rng(0), 2, 64)
    arrays["weight_packed"][:] = 0x2F  # -6, 1
    arrays["weight_scale"][:] = [[60, 127], [180, 250]]
    weight = open_packed(tmp_path, arrays, MXFP4).read("up.weight").dequantize()
    np.testing.assert_array_equal(weight[:, ::32], -6 * 2.0 ** np.array([[-67, 0], [53, 123]]))
    np.testing.assert_array_equal(weight[:, 1::32], 2.0 ** np.array([[-67, 0], [53, 123]]))


GPTQ_CASES = [
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


@pytest.mark.parametrize("case", GPTQ_CASES, ids=str)
def test_a_gptq_weight_is_the_files_to_the_bit(tmp_path, case):
    arrays, expected = gptq(np.random.default_rng(0), 40, 384, **case)
    opened = open_packed(
        tmp_path, arrays, {**GPTQ, "checkpoint_format": f"gptq{'_v2' if case.get('version') == 2 else ''}"}
    )
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
    zeros = open_packed(tmp_path, arrays, GPTQ).read("up.weight").row_zeros()
    np.testing.assert_array_equal(zeros.T + 8, [[0] * 8, [0, 7, 0, 0, 1, 0, 15, 0]])


@pytest.mark.parametrize(
    ("F", "D", "group"), [(40, 384, 128), (8, 96, 32), (24, 128, 64), (16, 320, 320), (8, 64, 64), (7, 96, 0)]
)
def test_an_awq_and_an_mxfp4_weight_is_the_files_to_the_bit(tmp_path, F, D, group):
    rng = np.random.default_rng(0)
    arrays, expected = awq(rng, F, D, group=group) if group else mxfp4(rng, F, D)
    opened = open_packed(tmp_path, arrays, AWQ if group else MXFP4)
    assert (opened.names(), opened.shape("up.weight")) == (["up.weight"], (F, D))
    assert opened.kind("up.weight") == (f"AWQ int4 by {'rows' if group == D else group}" if group else "MXFP4")
    np.testing.assert_array_equal(opened.read("up.weight").dequantize(), expected)


@pytest.mark.parametrize(
    ("packing", "make"),
    [
        ({"packing_format": "auto_round"}, partial(gptq, version=2, symmetric=False)),
        ({"packing_format": "auto_round:gptqmodel"}, partial(gptq, version=2, symmetric=False)),
        ({"packing_format": "auto_round:auto_awq"}, awq),
        ({"packing_format": "auto_round:auto_gptq"}, partial(gptq, symmetric=False, g_idx=False)),
        ({}, partial(gptq, symmetric=False)),
    ],
)
def test_a_weight_of_auto_round_is_the_files_to_the_bit(tmp_path, packing, make):
    arrays, expected = make(np.random.default_rng(0), 16, 96)
    opened = open_packed(tmp_path, arrays, {"quant_method": "auto-round", "bits": 4, "group_size": 32, **packing})
    np.testing.assert_array_equal(opened.read("up.weight").dequantize(), expected)


PACKED = {
    "weight_packed": np.zeros((1, 8), np.int32),
    "weight_scale": np.ones((1, 2), np.float32),
    "weight_shape": np.asarray([1, 64]),
}


def mxfp8(F, D):
    return {"weight": np.ones((F, D), ml_dtypes.float8_e4m3fn), "weight_scale": np.full((F, D // 32), 127, np.uint8)}


ARRAYS = {
    "packed": (COMPRESSED, lambda rng, **case: (PACKED,)),
    "fp8": (FINE, lambda rng, **case: float8(rng, 40, 384, **case)),
    "mxfp4": (MXFP4, lambda rng, **case: mxfp4(rng, 7, 96, **case)),
    "mxfp8": (COMPRESSED, lambda rng, **case: (mxfp8(7, 96),)),
    "gptq": (GPTQ, lambda rng, **case: gptq(rng, 40, 384, **case)),
    "awq": (AWQ, lambda rng, **case: awq(rng, 40, 384, **case)),
}
APPLIED = [{"targets": ["Linear"], "location": location} for location in ("weight_output", "input")]
ROTATED = {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": APPLIED}}}}
ONES = lambda *shape, dtype=np.float32: np.ones(shape, dtype)
AUTO_ROUND = {"quant_method": "auto-round"}
GROUPS_OF_48 = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"group_size": 48}}}}
TWO_GROUPS = {"scales": ONES(2, 40, dtype=np.float16), "qzeros": ONES(2, 5, dtype=np.int32)}
REFUSED = [
    ("packed", {"weight_zero_point": ONES(1, 1, dtype=np.int32)}, {}, r"up.weight_zero_point of .* shape \[1, 1\]"),
    ("packed", {"weight_g_idx": ONES(63, dtype=np.int32)}, {}, r"up.weight_g_idx of dtype int32 and shape \[63\]"),
    ("packed", {"weight_scale": ONES(1, 4)}, {}, "supported are 4 and 8 bits with a scale for 32"),
    ("packed", {"weight_shape": np.asarray([1])}, {}, "up.weight_packed of dtype int32"),
    ("packed", {}, {"config_groups": [3]}, "config_groups: expected"),
    ("packed", {"weight_packed": ONES(1, 7, dtype=np.int32)}, {}, "up.weight_packed of dtype int32"),
    ("packed", {"weight_packed": None}, {}, "has neither"),
    ("packed", {"weight_shape": None}, {}, "up.weight_packed has no up.weight_shape with it"),
    ("packed", {}, ROTATED, "transform_config: rotations of activations .location 'input'. are not supported"),
    ("packed", {}, {"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes', .*: compressed-tensors, gptq, awq,"),
    ("packed", {}, {"quant_method": []}, r"quantised by \[\]"),
    ("fp8", {"weight_scale_inv": None}, {}, "up.weight has no up.weight_scale_inv or up.weight_scale with it"),
    ("fp8", {"weight_scale_inv": ONES(3, 3)}, {}, r"shape \[3, 3\]; supported are 8-bit floats"),
    ("fp8", {"weight": ONES(40, 384, dtype=ml_dtypes.float8_e5m2)}, {}, "up.weight of dtype float8_e5m2"),
    ("fp8", {}, {"weight_block_size": [128, 48]}, "a scale for 32, 64, 128 inputs"),
    ("fp8", {}, {"weight_block_size": "128"}, "weight_block_size: expected"),
    ("mxfp4", {"weight_scale": ONES(7, 4, dtype=np.uint8)}, {}, r"up.weight_scale of dtype uint8 and shape \[7, 4\];"),
    ("mxfp4", {"weight_packed": ONES(7, 72, dtype=np.uint8)}, {}, "MXFP4 with an exponent"),
    ("mxfp4", {"weight_global_scale": ONES(1)}, {}, "NVFP4 is not supported; MXFP4, 8-bit floats and integers"),
    ("packed", {}, GROUPS_OF_48, r"up.weight_scale of dtype float32 and shape \[1, 2\]"),
    ("gptq", TWO_GROUPS, {"group_size": 256}, r"up.scales of dtype float16 and shape \[2, 40\]"),
    ("gptq", {}, {"rotation": "hadamard"}, "rotation: 'hadamard', of activations, is not supported"),
    ("gptq", {}, {"bits": 3}, "3 bits are not supported: 4 and 8 are"),
    ("gptq", {}, {"bits": "4"}, "bits: expected a whole number"),
    ("gptq", {}, {"checkpoint_format": "marlin"}, "'marlin' are not supported: gptq and gptq_v2 are"),
    ("gptq", {"qzeros": None}, {}, "up.qweight has no up.qzeros with it"),
    ("gptq", {"scales": ONES(3, 40, dtype=np.float16)}, {}, r"up.scales of dtype float16 and shape \[3, 40\]"),
    ("gptq", {"scales": ONES(12, 40, dtype=np.int32)}, {}, "the last of floats"),
    ("gptq", {"qweight": ONES(48, dtype=np.int32)}, {}, r"up.qweight of dtype int32 and shape \[48\]"),
    ("gptq", {"g_idx": ONES(383, dtype=np.int32)}, {}, r"up.g_idx of dtype int32 and shape \[383\]"),
    ("gptq", {"g_idx": None}, {"desc_act": True}, "up.g_idx missing, .* with desc_act"),
    ("gptq", {}, {**AUTO_ROUND, "packing_format": "auto_round:marlin"}, "'auto_round:marlin' of AutoRound is not supp"),
    ("gptq", {}, {**AUTO_ROUND, "act_bits": 8}, "AutoRound's int weights with inputs of 8 bits"),
    ("gptq", {}, {**AUTO_ROUND, "data_type": "mx_fp"}, "AutoRound's mx_fp weights"),
    ("awq", {}, {"version": "GEMV"}, "the version 'GEMV' are not supported: gemm is"),
    ("awq", {}, {"bits": 8}, "8 bits are not supported: 4 are"),
    ("awq", {}, {"version": 3}, "version: expected a text"),
    ("awq", {"scales": None}, {}, "up.qweight has no up.scales with it"),
    ("awq", {"qzeros": ONES(12, 4, dtype=np.int32)}, {}, r"up.qzeros of dtype int32 and shape \[12, 4\]"),
    ("awq", {"qweight": ONES(384, 5)}, {}, "the first two of int32"),
]


@pytest.mark.parametrize(("layout", "changes", "scheme", "says"), REFUSED)
def test_what_cannot_be_computed_with_is_refused_by_name(tmp_path, layout, changes, scheme, says):
    config, make = ARRAYS[layout]
    arrays = {**make(np.random.default_rng(0))[0], **changes}
    with pytest.raises(CheckpointError, match=says):
        open_packed(tmp_path, arrays, {**config, **scheme})


def test_rotations_of_weights_are_in_them_already(tmp_path):
    rotated = {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": APPLIED[:1]}}}}
    assert open_packed(tmp_path, PACKED, {**COMPRESSED, **rotated}).read("up.weight").shape == (1, 64)


@pytest.mark.parametrize(
    ("scales", "says"),
    [(None, "has no up.down_proj_scales with it"), ((2, 4, 3), r"blocks \[E, F, D / 32, 16\] and scales of uint8")],
)
def test_a_stack_in_mxfp4_that_does_not_go_together_is_refused_by_name(scales, says, tmp_path):
    arrays = {"down_proj_blocks": ONES(2, 4, 2, 16, dtype=np.uint8)}
    arrays |= {} if scales is None else {"down_proj_scales": ONES(*scales, dtype=np.uint8)}
    with pytest.raises(CheckpointError, match=says):
        open_packed(tmp_path, arrays, {"quant_method": "mxfp4"})


def test_groups_of_an_odd_size_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="a scale for 32, 64, 128 inputs or a multiple of them, or one for a row"):
        open_packed(tmp_path, gptq(np.random.default_rng(0), 40, 384, group=16)[0], GPTQ)


@pytest.mark.parametrize(
    ("layout", "name", "place", "value", "says"),
    [
        ("fp8", "weight", (3, 5), np.nan, "up.weight: it has values that are not numbers"),
        ("mxfp4", "weight_scale", (2, 1), 255, "up.weight_packed: its scales have values that are not numbers"),
        ("mxfp8", "weight_scale", (2, 1), 255, "up.weight: its scales have values that are not numbers"),
        ("gptq", "g_idx", 5, 11, "up.qweight: g_idx does not give each of 12 groups"),
    ],
)
def test_wrong_values_are_refused_when_they_are_read(tmp_path, layout, name, place, value, says):
    config, make = ARRAYS[layout]
    arrays = make(np.random.default_rng(0))[0]
    arrays[name][place] = value
    with pytest.raises(CheckpointError, match=says):
        open_packed(tmp_path, arrays, config).read("up.weight")


def test_weights_that_the_layout_cannot_hold_are_not_written(tmp_path):
    model = random_model(64, 4, 32)
    integers, scales, zeros = jnp.ones((5, 64), jnp.int8), jnp.ones((5, 2), jnp.float16), jnp.ones((5, 2), jnp.int8)
    model.up.weight.set_value(QuantizedWeight.from_integers(integers, scales, 4, 32, zeros))
    with pytest.raises(CheckpointError, match=r"up\.weight: only symmetric integers can be saved"):
        checkpoint.save(model, tmp_path, config={})
    two = nnx.Dict(a=random_model(64, 8, None), b=random_model(64, 4, 32))
    with pytest.raises(CheckpointError, match="several precisions"):
        checkpoint.save(two, tmp_path, config={})
    assert not list(tmp_path.glob("*.safetensors"))


def test_groups_that_do_not_divide_a_layer_are_refused_with_its_name(tmp_path):
    opened = Checkpoint.open(checkpoint.save(Model(33, nnx.Rngs(3)), tmp_path, config={}))
    chosen = lambda name: (4, 32) if name == "up.weight" else None
    with pytest.raises(InvalidParameterError, match=r"up\.weight: group_size: 32 does not divide"):
        load_module(abstract(33), opened, dtype=jnp.bfloat16, quantize=chosen)
