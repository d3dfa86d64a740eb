"""Adapters on the command line: generate, chat, serve, info and convert."""

import json

import pytest

from tests.support.adapters import adapter_weights, linear_sizes, save_adapter
from tests.support.tiny import random_weights, tiny_config

QUICK = ("--dtype", "float32", "--max-tokens", "6", "--temperature", "0")
SMALL = ("--max-num-seqs", "1", "--ignore-eos")
CONFIG = dict(max_position_embeddings=128)

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def weights():
    return random_weights(tiny_config(**CONFIG))


@pytest.fixture(scope="module")
def adapter(weights, tmp_path_factory):
    made = adapter_weights(linear_sizes(weights), rank=20, spread=0.5)  # above the engine's default rank
    return save_adapter(tmp_path_factory.mktemp("adapters") / "fox", made, rank=20, lora_alpha=30)


def test_generate_and_chat_go_through_the_adapter_as_if_it_were_merged(run, folder, adapter, tmp_path):
    done = run("convert", folder, tmp_path / "merged", "--lora", adapter)
    assert done.status == 0
    assert "14 weights changed" in done.out
    both = [("-m", folder, "--lora", adapter), ("-m", tmp_path / "merged"), ("-m", folder)]
    shown = [run("generate", "abc def", *model, *QUICK, *SMALL).out for model in both]
    assert shown[0] == shown[1] != shown[2]
    answers = [run("chat", "--message", "abc", *model, *QUICK).out for model in both]
    assert answers[0] == answers[1]


def test_info_says_what_an_adapter_is(run, adapter):
    facts = json.loads(run("info", adapter, "--json").out)
    assert (facts["adapter"], facts["base_model"], facts["rank"], facts["scale"]) == (
        "LoRA",
        "somebody/tiny",
        ["20"],
        ["1.5"],
    )
    assert facts["modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert "somebody/tiny" in run("info", adapter).out
