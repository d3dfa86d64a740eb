"""Folders of LoRA adapters as PEFT writes them: what is read, and one clear error for everything that is not."""

import json
import math
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.adapters import adapter_weights, save_adapter
from verax.checkpoint.peft import Adapter
from verax.errors import CheckpointError, UnsupportedModelError

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj"
SIZES = {Q: (6, 8), UP: (10, 8)}


@pytest.fixture
def make(tmp_path):
    """Open an adapter of two modules, with these settings; `ranks` by module."""

    def opened(ranks=None, **settings):
        weights = adapter_weights(SIZES, ranks=ranks)
        return Adapter.open(save_adapter(tmp_path, weights, **settings)), weights

    return opened


def test_matrices_are_float32_with_the_scale_in_the_second(make):
    adapter, weights = make(lora_alpha=10)
    assert set(adapter.pairs) == set(SIZES)
    a, b = adapter.read(Q)
    np.testing.assert_array_equal(a, weights[f"base_model.model.{Q}.lora_A.weight"])
    np.testing.assert_array_equal(b, np.float32(2.5) * weights[f"base_model.model.{Q}.lora_B.weight"])
    assert a.dtype == b.dtype == np.float32
    assert (adapter.rank, adapter.num_parameters, adapter.base) == (4, 4 * (14 + 18), "somebody/tiny")


def test_the_scale_is_by_rank_or_by_its_root(make):
    assert make(lora_alpha=6)[0].pairs[Q].scale == 6 / 4
    assert make(lora_alpha=6, use_rslora=True)[0].pairs[Q].scale == 6 / math.sqrt(4)


def test_patterns_match_ends_of_names_as_in_peft(make):
    adapter, _ = make(
        {UP: 2}, rank_pattern={"p_proj": 9, "mlp.up_proj": 2}, alpha_pattern={r"model\.layers\.\d+\.mlp\.up_proj": 7}
    )
    assert (adapter.pairs[UP].rank, adapter.pairs[UP].scale) == (2, 3.5)
    assert (adapter.pairs[Q].rank, adapter.pairs[Q].scale) == (4, 1.0)


def test_keys_with_the_adapters_name_are_read_too(tmp_path):
    weights = {key.replace(".weight", ".default.weight"): value for key, value in adapter_weights(SIZES).items()}
    assert set(Adapter.open(save_adapter(tmp_path, weights)).pairs) == set(SIZES)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' is not supported: it changes the base's weights"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(make, settings, says):
    with pytest.raises(UnsupportedModelError, match=says):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"r": 0}, "r: expected a whole number of 1"),
        ({"r": 5}, r"not the matrices of rank 5 that adapter_config\.json says"),
        ({"lora_alpha": "8"}, "lora_alpha: expected"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: expected"),
        ({"alpha_pattern": {"(": 2}}, "malformed"),
        ({"use_rslora": 1}, "use_rslora: expected true or false"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, settings, says):
    with pytest.raises(CheckpointError, match=says):
        make(**settings)


def test_layers_to_transform_and_target_modules_are_in_the_file_already(make):
    settings = {"layers_to_transform": [0, 11], "layers_pattern": "layers", "target_modules": "all-linear"}
    assert set(make(**settings)[0].pairs) == set(SIZES)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop(f"base_model.model.{Q}.lora_B.weight"), "lora_A.weight lacks its other matrix"),
        (lambda w: w.clear(), "has no matrices"),
        (lambda w: w.update({"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}), r"lm_head\.weight"),
        (lambda w: w.update({f"base_model.model.{Q}.lora_magnitude_vector": np.zeros(6, np.float32)}), "magnitude"),
        (lambda w: w.update({f"{Q}.lora_A.weight": np.zeros((4, 8), np.float32)}), "keys begin with base_model.model."),
        (lambda w: w.update({f"base_model.model.{Q}.lora_A.weight": np.zeros((4, 8, 1), np.float32)}), "rank 4"),
        (lambda w: w.update({f"base_model.model.{Q}.lora_A.weight": np.zeros((4, 8), np.int32)}), "expected floats"),
    ],
)
def test_files_with_other_tensors_are_refused_with_their_keys(tmp_path, change, says):
    weights = adapter_weights(SIZES)
    save_adapter(tmp_path, weights)
    change(weights)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        Adapter.open(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path, value):
    weights = adapter_weights(SIZES)
    weights[f"base_model.model.{UP}.lora_A.weight"][1, 2] = value
    with pytest.raises(CheckpointError, match=r"up_proj\.lora_A\.weight has numbers that are not finite"):
        Adapter.open(save_adapter(tmp_path, weights)).read(UP)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(make, tmp_path, name):
    make()
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: no such file"):
        Adapter.open(tmp_path)


def test_damaged_files_are_named(make, tmp_path):
    make()
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: .*damaged or incomplete"):
        Adapter.open(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 4')
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: not valid JSON"):
        Adapter.open(tmp_path)


def test_a_pickled_file_is_read_without_running_it(make, tmp_path):
    make()
    (tmp_path / "adapter_model.safetensors").unlink()
    with zipfile.ZipFile(tmp_path / "adapter_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin"):
        Adapter.open(tmp_path)


def test_settings_of_newer_versions_that_change_nothing_are_accepted(make):
    adapter, _ = make(eva_config=None, megatron_config=None, qalora_group_size=16, corda_config=None, loftq_config={})
    assert json.dumps(adapter.settings["loftq_config"]) == "{}"
