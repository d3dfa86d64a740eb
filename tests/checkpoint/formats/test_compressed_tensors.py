"""Quantised checkpoints: integers and scales survive a file exactly, and what cannot be computed with is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.support.packing import dequantized, open_packed, pack_rows, random_codes
from tests.support.tiny import tiny_checkpoint
from verax import checkpoint
from verax.checkpoint import Checkpoint, load_module
from verax.errors import CheckpointError, InvalidParameterError
from verax.nn import Linear
from verax.ops.quantized import QuantizedWeight, quantize

FORMAT = {"quant_method": "compressed-tensors"}


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
    assert opened.config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == bits


def test_every_code_is_where_the_layout_has_it(tmp_path):
    # Written by hand from the format's description: input i in bits 4 i of the row, plus 8.
    values = np.arange(64) % 16 - 8
    words = np.zeros((1, 8), np.uint32)
    for i, value in enumerate(values):
        words[0, i // 8] |= np.uint32(int(value) + 8) << np.uint32(4 * (i % 8))
    tensors = {
        "weight_packed": words.view(np.int32),
        "weight_scale": np.asarray([[0.5, 2.0]], np.float32),
        "weight_shape": np.asarray([1, 64]),
    }
    weight = open_packed(tmp_path, tensors, FORMAT).read("up.weight")
    np.testing.assert_array_equal(weight.integers()[0], values)
    np.testing.assert_array_equal(weight.dequantize()[0], values * np.repeat([0.5, 2.0], 32))


def test_eight_bits_without_packing_are_read_too(tmp_path):
    integers = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    scales = np.asarray([[0.1], [1.0], [3.0]], np.float32)
    weight = open_packed(tmp_path, {"weight": integers, "weight_scale": scales}, FORMAT).read("up.weight")
    np.testing.assert_array_equal(weight.dequantize(), integers * scales)


def test_scales_that_float16_cannot_hold_stay_float32(tmp_path):
    scales = np.asarray([[1e-6, 1.0]], np.float32)
    tensors = {
        "weight_packed": np.zeros((1, 8), np.int32),
        "weight_scale": scales,
        "weight_shape": np.asarray([1, 64]),
    }
    np.testing.assert_array_equal(open_packed(tmp_path, tensors, FORMAT).read("up.weight").row_scales(), scales)


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
    weight = open_packed(tmp_path, tensors, FORMAT).read("up.weight")
    np.testing.assert_array_equal(weight.dequantize(), dequantized(codes, zeros, scales, g_idx))


def test_eight_bits_without_packing_may_have_zero_points(tmp_path):
    integers = np.array([[-128, 127], [3, 4]], np.int8)
    scales, zeros = np.asarray([[0.5], [2.0]], np.float32), np.array([[-100], [5]], np.int8)
    arrays = {"weight": integers, "weight_scale": scales, "weight_zero_point": zeros}
    weight = open_packed(tmp_path, arrays, FORMAT).read("up.weight")
    np.testing.assert_array_equal(weight.dequantize(), (integers.astype(np.int32) - zeros) * scales)


def test_a_weight_with_zero_points_is_not_written_without_them(tmp_path):
    model = random_model(64, 4, 32)
    zeros = jnp.ones((5, 2), jnp.int8)
    integers, scales = jnp.ones((5, 64), jnp.int8), jnp.ones((5, 2), jnp.float16)
    model.up.weight.set_value(QuantizedWeight.from_integers(integers, scales, 4, 32, zeros))
    with pytest.raises(CheckpointError, match=r"up\.weight: only symmetric integers can be saved"):
        checkpoint.save(model, tmp_path, config={})


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


@pytest.mark.parametrize(
    ("changes", "config", "says"),
    [
        ({"weight_zero_point": np.zeros((1, 1), np.int32)}, FORMAT, r"up.weight_zero_point of .* shape \[1, 1\]"),
        ({"weight_g_idx": np.zeros(63, np.int32)}, FORMAT, r"up.weight_g_idx of dtype int32 and shape \[63\]"),
        ({"weight_scale": np.ones((1, 4), np.float32)}, FORMAT, "supported are 4 and 8 bits with a scale for 32"),
        ({"weight_shape": np.asarray([1])}, FORMAT, "up.weight_packed of dtype int32"),
        ({}, {**FORMAT, "config_groups": [3]}, "config_groups: expected"),
        ({"weight_packed": np.zeros((1, 7), np.int32)}, FORMAT, "up.weight_packed of dtype int32"),
        ({"weight_packed": None}, FORMAT, "has neither"),
        ({"weight_shape": None}, FORMAT, "up.weight_packed has no up.weight_shape with it"),
        ({}, {"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes', .*: compressed-tensors, gptq, awq, fp8,"),
        ({}, {"quant_method": []}, r"quantised by \[\]"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path, changes, config, says):
    tensors = {
        "weight_packed": np.zeros((1, 8), np.int32),
        "weight_scale": np.ones((1, 2), np.float32),
        "weight_shape": np.asarray([1, 64]),
        **changes,
    }
    with pytest.raises(CheckpointError, match=says):
        open_packed(tmp_path, tensors, config)


def test_weights_of_two_precisions_are_not_saved_together(tmp_path):
    class Two(nnx.Module):
        def __init__(self):
            self.a, self.b = random_model(64, 8, None), random_model(64, 4, 32)

    with pytest.raises(CheckpointError, match="several precisions"):
        checkpoint.save(Two(), tmp_path, config={})
    assert not list(tmp_path.glob("*.safetensors"))


def test_loading_quantises_the_named_layers_only(tmp_path):
    folder = checkpoint.save(Model(64, nnx.Rngs(3)), tmp_path, config={})
    chosen = lambda name: (4, 32) if name == "up.weight" else None
    quantised = load_module(abstract(64), Checkpoint.open(folder), dtype=jnp.bfloat16, quantize=chosen)
    kernel = jnp.asarray(load_file(folder / "model.safetensors")["up.weight"])
    same(quantize(kernel, 4, 32), quantised.up.weight.get_value())


def test_groups_that_do_not_divide_a_layer_are_refused_with_its_name(tmp_path):
    folder = checkpoint.save(Model(33, nnx.Rngs(3)), tmp_path, config={})
    with pytest.raises(InvalidParameterError, match=r"up\.weight: group_size: 32 does not divide"):
        load_module(
            abstract(33),
            Checkpoint.open(folder),
            dtype=jnp.bfloat16,
            quantize=lambda name: (4, 32) if name.endswith("weight") else None,
        )


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path):
    from verax.loading import load_causal_lm

    tiny_checkpoint(tmp_path / "a")
    quantised = load_causal_lm(Checkpoint.open(tmp_path / "a"), dtype="bfloat16", quantization="int8")
    config = {**Checkpoint.open(tmp_path / "a").config, "tie_word_embeddings": False}
    checkpoint.save(quantised, tmp_path / "b", config=config)
    opened = Checkpoint.open(tmp_path / "b")
    load_causal_lm(opened, dtype="bfloat16")
    with pytest.raises(CheckpointError, match="quantised already"):
        load_causal_lm(opened, dtype="bfloat16", quantization="int4")
