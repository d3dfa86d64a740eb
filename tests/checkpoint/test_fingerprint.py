"""The fingerprint of a checkpoint: that of its weights, wherever they are, and of no others."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.packing import gptq
from tests.support.tiny import tiny_checkpoint
from verax.checkpoint import Checkpoint, fingerprint

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
