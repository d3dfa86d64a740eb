"""Stacks of experts: read from single matrices and from one array, quantised or not; written as single matrices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.packing import awq, float8, gptq
from tests.support.tiny import random_weights, tiny_checkpoint, tiny_config
from verax import checkpoint
from verax.checkpoint import Checkpoint
from verax.checkpoint.formats import compressed_tensors
from verax.errors import CheckpointError
from verax.loading import load_causal_lm
from verax.models import causal_lm
from verax.ops import QuantizedWeight, quantize

MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, hidden_size=64, tie_word_embeddings=False)
STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same weights with a key for each matrix, and with a key for each stack."""
    stacked = tiny_checkpoint(tmp_path_factory.mktemp("moe") / "stacked", family="qwen3_moe", **MOE)
    single = tmp_path_factory.mktemp("moe") / "single"
    opened = Checkpoint.open(stacked)
    checkpoint.save(load_causal_lm(opened, dtype="float32"), single, config=opened.config, tokenizer_from=stacked)
    return stacked, single


def weights(model):
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(theirs[name]), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_single_matrices_are_written_and_read_into_their_stack(folders):
    stacked, single = folders
    names = Checkpoint.open(single).names()
    assert STACK in Checkpoint.open(stacked).names()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert STACK not in names
    loaded = weights(load_causal_lm(Checkpoint.open(single), dtype="bfloat16"))
    assert_equal(loaded, weights(load_causal_lm(Checkpoint.open(stacked), dtype="bfloat16")))
    file = Checkpoint.open(single)
    expert = f"{STACK.removesuffix('.gate_up_proj')}.2."
    parts = [file.read(f"{expert}{name}.weight") for name in ("gate_proj", "up_proj")]
    np.testing.assert_array_equal(loaded[STACK][2], np.concatenate(parts).astype(jnp.bfloat16))
    assert loaded["model.layers.1.mlp.gate.weight"].dtype == jnp.float32


@pytest.mark.parametrize("quantization", ["int8", "int4", (8, 32)])
def test_experts_are_quantised_alike_from_both_and_stay_so_on_disk(folders, quantization, tmp_path):
    stacked, single = (Checkpoint.open(folder) for folder in folders)
    model = load_causal_lm(single, dtype="bfloat16", quantization=quantization)
    loaded = weights(model)
    assert_equal(loaded, weights(load_causal_lm(stacked, dtype="bfloat16", quantization=quantization)))
    assert isinstance(loaded[STACK], QuantizedWeight)
    assert loaded[STACK].shape == (4, 64, 64)
    plain = {name for name, value in loaded.items() if not isinstance(value, QuantizedWeight) and value.ndim > 1}
    assert plain == {"model.embed_tokens.weight", *(f"model.layers.{i}.mlp.gate.weight" for i in (0, 1))}
    checkpoint.save(model, tmp_path, config=single.config)
    written = Checkpoint.open(tmp_path)
    assert written.packed["model.layers.0.mlp.experts.1.down_proj.weight"].shape == (64, 32)
    assert written.config["quantization_config"]["ignore"] == [f"model.layers.{i}.mlp.gate" for i in (0, 1)]
    assert_equal(loaded, weights(load_causal_lm(written, dtype="bfloat16")))


def test_packed_matrices_whose_rows_fill_no_whole_block_are_put_together(tmp_path):
    config = tiny_config("qwen3_moe", **{**MOE, "moe_intermediate_size": 24})
    checkpoint.save(random_weights(config), tmp_path / "plain", config=config)
    checkpoint.save(load_causal_lm(Checkpoint.open(tmp_path / "plain"), dtype="float32"), tmp_path / "a", config=config)
    opened = Checkpoint.open(tmp_path / "a")
    arrays, packed = {}, {}
    for name in opened.names():
        if re.search(r"experts\.\d+\.(gate|up)_proj", name):
            packed[name] = quantize(jnp.asarray(opened.read(name)), 4, 32)
            arrays |= compressed_tensors.entries(name, packed[name])
        else:
            arrays[name] = np.asarray(opened.read(name))
    scheme = compressed_tensors.quantization_config(packed.values())
    checkpoint.save(arrays, tmp_path / "b", config={**config, "quantization_config": scheme})
    stack = weights(load_causal_lm(Checkpoint.open(tmp_path / "b"), dtype="float32"))[STACK]
    assert stack.shape == (4, 48, 64)
    expert = [packed[f"model.layers.1.mlp.experts.2.{name}.weight"].dequantize() for name in ("gate_proj", "up_proj")]
    np.testing.assert_array_equal(jax.tree.map(lambda part: part[2], stack).dequantize(), np.concatenate(expert))


def packed_experts(folder, target, pack, scheme):
    """A copy of a checkpoint with its experts packed, and their float weights by key."""
    opened, rng = Checkpoint.open(folder), np.random.default_rng(0)
    arrays, floats = {}, {}
    for name in opened.names():
        weight = np.asarray(opened.read(name))
        if re.search(r"experts\.\d+\.", name):
            parts, floats[name] = pack(rng, *weight.shape)
            arrays |= {f"{name.removesuffix('.weight')}.{last}": part for last, part in parts.items()}
        else:
            arrays[name] = weight
    checkpoint.save(arrays, target, config={**opened.config, "quantization_config": scheme})
    return floats


@pytest.mark.parametrize(
    ("pack", "scheme"),
    [(awq, {"quant_method": "awq"}), (float8, {"quant_method": "fp8", "weight_block_size": [128, 128]})],
)
def test_packed_experts_of_published_layouts_are_put_together(folders, tmp_path, pack, scheme):
    floats = packed_experts(folders[1], tmp_path, pack, scheme)
    stack = weights(load_causal_lm(Checkpoint.open(tmp_path), dtype="float32"))[STACK]
    keys = [f"{STACK.removesuffix('.gate_up_proj')}.2.{name}.weight" for name in ("gate_proj", "up_proj")]
    expected = np.concatenate([floats[key] for key in keys])
    np.testing.assert_allclose(jax.tree.map(lambda part: part[2], stack).dequantize(), expected, rtol=1e-6)


def test_an_experts_matrices_in_several_orders_of_inputs_are_refused(folders, tmp_path):
    pack = lambda rng, F, D: gptq(rng, F, D, act_order=D == 64)
    packed_experts(folders[1], tmp_path, pack, {"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="take their inputs in several orders"):
        load_causal_lm(Checkpoint.open(tmp_path), dtype="float32")


def changed(folder, target, change):
    """A copy of a checkpoint whose arrays `change` has changed."""
    opened = Checkpoint.open(folder)
    arrays = {name: np.asarray(opened.read(name)) for name in opened.names()}
    change(arrays)
    return Checkpoint.open(checkpoint.save(arrays, target, config=opened.config))


def test_a_missing_expert_and_one_of_another_shape_are_named(folders, tmp_path):
    key = "model.layers.0.mlp.experts.2.up_proj.weight"

    def without(arrays):
        del arrays[key]

    def narrower(arrays):
        arrays[key] = arrays[key][:24]

    with pytest.raises(CheckpointError, match=f"{re.escape(key)} missing"):
        load_causal_lm(changed(folders[1], tmp_path / "without", without), dtype="float32")
    with pytest.raises(
        CheckpointError, match=f"{re.escape(key)} has shape .24, 64., config.json's model needs .32, 64."
    ):
        load_causal_lm(changed(folders[1], tmp_path / "narrower", narrower), dtype="float32")


def test_random_experts_keep_the_scale_of_their_inputs():
    architecture, config = causal_lm(tiny_config("qwen3_moe", **MOE))
    from verax.checkpoint.load import random_weights as drawn

    arrays = drawn(nnx.eval_shape(lambda: architecture(config, rngs=nnx.Rngs(0))))
    assert arrays[STACK].std() == pytest.approx(64**-0.5, rel=0.05)
    assert not np.array_equal(arrays[STACK][0], arrays[STACK][1])
