"""Opening a folder: one file, several with an index or without; errors of incomplete ones; and the fingerprint."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoint.small import assert_same, weights, write
from tests.support.adapters import tiny_adapter
from tests.support.packing import gptq
from tests.support.tiny import tiny_checkpoint
from verax.checkpoint import Checkpoint, fingerprint
from verax.checkpoint.checkpoint import config_of_floats
from verax.errors import CheckpointError
from verax.text.tokens.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"


def read_all(folder):
    opened = Checkpoint.open(folder)
    return {name: opened.read(name) for name in opened.names()}


@pytest.mark.parametrize("shards", [1, 3])
def test_every_weight_is_found_in_its_file(shards, tmp_path):
    expected = weights()
    write(tmp_path, expected, shards=shards)
    assert_same(read_all(tmp_path), expected)
    opened = Checkpoint.open(tmp_path)
    assert opened.nbytes == sum(array.nbytes for array in expected.values())
    assert opened.info("embed.weight")[:2] == (np.dtype(np.float32), (37, 7))
    assert opened.place("layers.0.up.weight")[0].name == (
        "model.safetensors" if shards == 1 else "model-00002-of-00003.safetensors"
    )


def test_files_without_an_index_are_joined(tmp_path):
    expected = weights()
    write(tmp_path, expected, shards=2)
    (tmp_path / INDEX).unlink()
    assert_same(read_all(tmp_path), expected)


def test_attributes_that_macos_keeps_next_to_each_file_are_no_weights(tmp_path):
    write(tmp_path, weights())
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (tmp_path / "._weights.safetensors").write_bytes(b"\0\5\26\7" + bytes(78))
    assert_same(read_all(tmp_path), weights())


@pytest.mark.parametrize("shards", [1, 2])
def test_one_file_or_an_index_goes_before_files_by_other_names(shards, tmp_path):
    write(tmp_path, weights(), shards=shards)
    save_file({**weights(seed=1), "adapter": np.ones(3)}, tmp_path / "consolidated.safetensors")
    assert_same(read_all(tmp_path), weights())


def test_configurations_are_read(tmp_path):
    write(tmp_path, weights(), config={"model_type": "qwen3", "eos_token_id": [1, 2]})
    assert Checkpoint.open(tmp_path).config == {"model_type": "qwen3", "eos_token_id": [1, 2]}
    assert Checkpoint.open(tmp_path).generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert Checkpoint.open(str(tmp_path)).generation_config == {"temperature": 0.6}
    assert Checkpoint.open(tmp_path).folder == tmp_path


def test_a_model_as_floats_has_no_scheme_at_any_level():
    scheme = {"quant_method": "gptq"}
    nested = {"a": 1, "compression_config": scheme, "text_config": {"b": 2, "quantization_config": scheme}}
    assert config_of_floats(nested) == {"a": 1, "text_config": {"b": 2}}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "not valid JSON"), ("[1]", "JSON object"), ("\udcff", "not valid JSON"), ("[" * 99999, "JSON")],
)
def test_damaged_json_is_named(name, text, problem, tmp_path):
    write(tmp_path, weights(), shards=2)
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=rf"{name}: .*{problem}"):
        Checkpoint.open(tmp_path)


def promise_a_key(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["layers.7.up.weight"] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def repeat_a_key(folder):
    (folder / INDEX).unlink()
    save_file({"layers.1.gain": np.ones(())}, folder / "zz.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: no such file"),
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            rf"model-00002-of-00002\.safetensors missing.*{INDEX}",
        ),
        (promise_a_key, rf"model-00002-of-00002\.safetensors: layers\.7\.up\.weight missing.*{INDEX}"),
        (repeat_a_key, r"zz\.safetensors: layers\.1\.gain is in model-0000\d-of-00002\.safetensors too"),
    ],
)
def test_what_is_missing_or_there_twice_is_named_with_its_files(damage, says, tmp_path):
    damage(write(tmp_path, weights(), shards=2))
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(tmp_path)


def test_weights_in_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "consolidated.00.pth").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no safetensors files, .*; consolidated\.00\.pth cannot be read"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "pytorch_model-00001-of-00002.bin"}}')
    with pytest.raises(
        CheckpointError, match=r"pytorch_model-00001-of-00002\.bin missing, which pytorch_model\.bin\.index"
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name, tmp_path):
    tiny_checkpoint(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456789\n")
    with pytest.raises(CheckpointError, match=rf"{name}: a pointer of Git LFS.* git lfs pull"):
        Tokenizer.from_checkpoint(Checkpoint.open(tmp_path))


def test_a_model_that_mlx_has_quantised_is_refused_by_that_name(tmp_path):
    """Newer files have quantization_config too, without the name of a method."""
    write(tmp_path, {"up.weight": np.zeros((4, 1), np.uint32), "up.scales": np.zeros((4, 1), np.float16)})
    scheme = {"group_size": 64, "bits": 4, "mode": "affine"}
    for more in ({}, {"quantization_config": scheme}):
        (tmp_path / "config.json").write_text(json.dumps({"quantization": scheme, **more}))
        with pytest.raises(CheckpointError, match="quantised by 'MLX', which is not supported"):
            Checkpoint.open(tmp_path)


@pytest.mark.parametrize(("dtype", "floats"), [(np.float16, True), (np.uint8, False)])
def test_floats_under_a_scheme_that_is_not_supported_are_told_from_others(tmp_path, dtype, floats):
    write(tmp_path, {"up.weight": np.zeros((4, 1), dtype)})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(CheckpointError, match="'bitsandbytes', which is not supported") as caught:
        Checkpoint.open(tmp_path)
    assert ("all its weights are floats" in str(caught.value)) == floats


def test_an_adapter_alone_is_no_checkpoint(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="this is a LoRA adapter; open its base model"):
        Checkpoint.open(tmp_path)


def test_an_adapter_next_to_the_weights_is_not_left_out(tmp_path):
    """transformers reads the base that it names, and the adapter."""
    tiny_checkpoint(tmp_path)
    tiny_adapter(tmp_path, tmp_path / "adapter")
    for path in (tmp_path / "adapter").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(CheckpointError, match="a LoRA adapter next to"):
        Checkpoint.open(tmp_path)


def test_an_unknown_weight_is_named(tmp_path):
    opened = Checkpoint.open(write(tmp_path, weights()))
    for ask in (opened.read, opened.info, opened.release, opened.place):
        with pytest.raises(CheckpointError, match=r"it has no weight nowhere\.weight"):
            ask("nowhere.weight")


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("fingerprint") / "tiny")


@pytest.fixture
def changed(folder, tmp_path):
    """Fingerprint of the checkpoint after a change of its weights, in `files` of equal numbers of them."""

    def of(change=lambda weights: None, files=1):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        names = list(weights)
        for i in range(files):
            save_file({name: weights[name] for name in names[i::files]}, tmp_path / f"part-{i}.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        return fingerprint(Checkpoint.open(tmp_path))

    return of


def test_weights_have_one_fingerprint_in_whichever_files_they_are(folder, changed):
    assert changed() == changed(files=3) == fingerprint(Checkpoint.open(folder))


def noisy(weights):
    rng = np.random.default_rng(0)
    weights[EMBEDDING] = weights[EMBEDDING] * rng.choice([1, 1.01], weights[EMBEDDING].shape).astype(np.float32)


@pytest.mark.parametrize(
    "change",
    [
        noisy,
        lambda weights: weights.update({NORM: -weights[NORM]}),
        lambda weights: weights.update({NORM: weights[NORM].astype(np.float16)}),
        lambda weights: weights.update({"other": weights.pop(NORM)}),
        lambda weights: weights.update({EMBEDDING: weights[EMBEDDING][::-1].copy()}),
    ],
)
def test_other_weights_have_another_one(folder, changed, change):
    assert changed(change) != fingerprint(Checkpoint.open(folder))


def test_a_quantised_weight_counts_with_all_that_makes_it_up(tmp_path):
    arrays, _ = gptq(np.random.default_rng(0), 40, 384)
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    found = set()
    for factor in (1, 2):
        scaled = {**arrays, "scales": arrays["scales"] * np.float16(factor)}
        save_file({f"up.{name}": array for name, array in scaled.items()}, tmp_path / "model.safetensors")
        found.add(fingerprint(Checkpoint.open(tmp_path)))
    assert len(found) == 2
