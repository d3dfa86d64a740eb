"""Adapters merged into a checkpoint: sums in float32, rounded once, and a folder like the base's."""

import json

import ml_dtypes
import numpy as np
import pytest

from tests.support.adapters import adapter_weights, changed, linear_sizes, save_adapter
from tests.support.tiny import random_weights, tiny_checkpoint, tiny_config
from verax.checkpoint import Checkpoint, save
from verax.checkpoint.peft import Adapter, merge
from verax.errors import CheckpointError
from verax.loading import load_causal_lm

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def weights():
    return random_weights(tiny_config())


@pytest.fixture
def adapter(weights, tmp_path):
    """An adapter of all linear layers, with its weights, whose scale is 3 / 4."""
    made = adapter_weights(linear_sizes(weights), spread=0.5)
    return Adapter.open(save_adapter(tmp_path / "adapter", made, lora_alpha=3)), made


def read(folder):
    opened = Checkpoint.open(folder)
    return {name: opened.read(name) for name in opened.names()}


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("base", ["float32", "bfloat16"])
def test_sums_are_those_of_float32_rounded_once(weights, adapter, tmp_path, base, dtype):
    tiny_checkpoint(tmp_path / "base", dtype=base)
    merge(Checkpoint.open(tmp_path / "base"), adapter[0], tmp_path / "merged", dtype=dtype)
    stored = {name: np.asarray(weight).astype(np.float32) for name, weight in read(tmp_path / "base").items()}
    written = np.dtype(getattr(ml_dtypes, dtype or base, None) or (dtype or base))
    got = read(tmp_path / "merged")
    for name, weight in changed(stored, adapter[1], scale=0.75).items():
        assert got[name].dtype == written
        # A sum that lies between two numbers of bfloat16 may be rounded to either.
        tolerance = dict(atol=1e-6) if written == np.float32 else dict(rtol=2**-7)
        rounded = weight.astype(written).astype(np.float32)
        np.testing.assert_allclose(got[name].astype(np.float32), rounded, **tolerance)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == {"temperature": 0.7}


def test_weights_without_an_adapter_keep_their_bits(weights, tmp_path):
    tiny_checkpoint(tmp_path / "base", dtype="bfloat16")
    made = Adapter.open(save_adapter(tmp_path / "adapter", adapter_weights({Q: (64, 64)})))
    merge(Checkpoint.open(tmp_path / "base"), made, tmp_path / "merged")
    before, after = read(tmp_path / "base"), read(tmp_path / "merged")
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == [f"{Q}.weight"]


def test_weights_that_lie_the_other_way_round_get_the_transpose(tmp_path):
    config = {"model_type": "gpt2"}
    save({"h.0.c_fc.weight": np.zeros((3, 5), np.float32)}, tmp_path / "base", config=config)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    made = adapter_weights({"transformer.h.0.c_fc": (5, 3)}, rank=2)
    opened = Adapter.open(save_adapter(tmp_path / "adapter", made, rank=2, fan_in_fan_out=True))
    aliases = ((r"^transformer\.", ""),)
    merge(Checkpoint.open(tmp_path / "base"), opened, tmp_path / "merged", aliases=aliases)
    expected = changed({"transformer.h.0.c_fc.weight": np.zeros((5, 3), np.float32)}, made)
    got = read(tmp_path / "merged")["h.0.c_fc.weight"]
    np.testing.assert_allclose(got, expected["transformer.h.0.c_fc.weight"].T, rtol=1e-6)


def test_a_base_in_another_layout_has_the_same_modules(adapter, weights, tmp_path):
    renamed = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    tiny_checkpoint(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    save(renamed, tmp_path / "base", config=tiny_config())
    aliases = ((r"^model\.", "model.language_model."),)
    merge(Checkpoint.open(tmp_path / "base"), adapter[0], tmp_path / "merged", aliases=aliases)
    expected = changed(weights, adapter[1], scale=0.75)[f"{Q}.weight"]
    got = read(tmp_path / "merged")["model.language_model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_quantised_base_becomes_floats(adapter, tmp_path):
    tiny_checkpoint(tmp_path / "base")
    opened = Checkpoint.open(tmp_path / "base")
    quantized = load_causal_lm(opened, dtype="float32", quantization="int8")
    config = {**opened.config, "tie_word_embeddings": False}
    save(quantized, tmp_path / "int8", config=config, tokenizer_from=opened.folder)
    merge(Checkpoint.open(tmp_path / "int8"), adapter[0], tmp_path / "merged", dtype="float32")
    dequantized = load_causal_lm(Checkpoint.open(tmp_path / "int8"), dtype="float32", quantization="dequantize")
    stored = {f"{Q}.weight": np.asarray(dequantized.model.layers[0].self_attn.q_proj.weight[...])}
    expected = changed({**read(tmp_path / "base"), **stored}, adapter[1], scale=0.75)[f"{Q}.weight"]
    merged = Checkpoint.open(tmp_path / "merged")
    assert not merged.packed
    assert "quantization_config" not in merged.config
    assert merged.config["torch_dtype"] == "float32"
    np.testing.assert_allclose(merged.read(f"{Q}.weight"), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"model.layers.7.self_attn.q_proj": (64, 64)}, r"has no weights of model\.layers\.7.*trained for"),
        ({Q: (64, 32)}, r"another base than .*adapter \[64, 32\], base \[64, 64\]"),
    ],
)
def test_an_adapter_of_another_base_is_refused_before_anything_is_written(tmp_path, sizes, says):
    tiny_checkpoint(tmp_path / "base")
    made = Adapter.open(save_adapter(tmp_path / "adapter", adapter_weights(sizes)))
    with pytest.raises(CheckpointError, match=says):
        merge(Checkpoint.open(tmp_path / "base"), made, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
