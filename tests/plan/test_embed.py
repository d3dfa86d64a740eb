"""The plan of a sentence encoder."""

import jax
import pytest

from tests.support.tiny_encoder import SIZES, tiny_encoder
from verax import Encoder
from verax.errors import InvalidParameterError
from verax.plan.devices import find_device
from verax.plan.model import Described
from verax.plan.run import plan
from verax.plan.text import plan_embed

DEVICE = find_device("test", memory=1e9, bandwidth=1e11, flops=1e13)
TINY = Described("tiny", "embedding", {"model_type": "bert", **SIZES})


def test_products_are_those_of_a_formula_by_hand():
    B, T, D, F, L = 3, 20, SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_hidden_layers"]
    result = plan_embed(TINY, DEVICE, batch_size=B, max_length=T)
    (program,) = result["programs"]
    assert program["flops"] == B * L * (2 * T * (4 * D * D + 2 * D * F) + 4 * T * T * D)
    assert program["parts_s"]["compute"] == program["flops"] / DEVICE.rate("float32")
    assert result["fits"]
    assert {row["part"] for row in result["weights"]} == {"embedding", "attention", "feed-forward", "norms"}


def test_weights_of_a_cpu_are_those_of_a_loaded_encoder_with_the_rows_that_fill_panels(tmp_path):
    folder = tiny_encoder(tmp_path / "model", hidden_size=64)
    encoder = Encoder(folder, show_progress=False)
    cpu = find_device("cpu", memory=8e9, bandwidth=1e10, flops=1e12)
    result = plan(str(folder), cpu, batch_size=3, max_length=20)
    assert result["memory"]["weights"] == sum(array.nbytes for array in jax.tree.leaves(encoder._weights))


def test_wrong_options_are_named():
    with pytest.raises(InvalidParameterError, match="max_length: expected 1 to 64 tokens, got 65"):
        plan_embed(TINY, DEVICE, max_length=65)
    with pytest.raises(
        InvalidParameterError, match="devices: the plan of a model of kind embedding has no such option"
    ):
        plan("encoder-builtin", DEVICE, devices=2)
