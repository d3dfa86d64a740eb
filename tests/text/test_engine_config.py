"""Options of the engine, as one record and as keyword arguments; an engine without a tokenizer."""

import pytest

import verax
from tests.text.conftest import make_llm
from verax.errors import CheckpointError, InvalidParameterError
from verax.text.engine.engine_config import EngineConfig

GREEDY = verax.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


WHOLE = [{name: value} for name in ("max_num_seqs", "block_size", "max_lora_rank") for value in (0, -1, True, 2.0, "8")]
WRONG = [
    *((options, f"{next(iter(options))}: expected a whole number of at least 1") for options in WHOLE),
    ({"max_loras": 3, "max_cpu_loras": 2}, r"max_cpu_loras: 2 is less than max_loras \(3\)"),
    ({"seed": -1}, "seed: expected a whole number of 0 to 9223372036854775807, got -1"),
    ({"seed": 2**63}, "seed: expected a whole number of 0 to 9223372036854775807"),
    ({"nnodes": 0}, "nnodes: expected a whole number of at least 1"),
    ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, r"node_rank: 2 hosts \(nnodes\) have .* 0 to 1, got 2"),
    ({"node_rank": -1}, "node_rank: expected a whole number of at least 0"),
    ({"nnodes": 2, "tensor_parallel_size": 3}, "tensor_parallel_size: 3 devices do not divide over 2 hosts"),
    ({"master_addr": "::1"}, r"master_addr: expected HOST, HOST:PORT or \[IPV6\]:PORT, got '::1'"),
    ({"master_addr": "http://10.0.0.1"}, "master_addr: expected HOST"),
    ({"programs": ""}, "programs: expected the path of a folder, got an empty text"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_make_no_sense_are_refused_with_what_would(options, message):
    with pytest.raises(InvalidParameterError, match=f"^{message}"):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("address", "port", "expected"),
    [
        ("10.0.0.1", 29501, "10.0.0.1:29501"),
        ("node-0:80", 29501, "node-0:80"),
        ("[::1]", 80, "[::1]:80"),
        ("[::1]:81", 80, "[::1]:81"),
    ],
)
def test_the_address_of_rank_0_has_the_port_of_its_own_option_unless_it_names_one(address, port, expected):
    assert EngineConfig(master_addr=address, master_port=port).coordinator == expected


def test_an_unknown_option_is_refused_with_the_known_ones_before_anything_is_loaded(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"max_seqs: no such option.*max_num_seqs"):
        verax.LLM(tmp_path / "nothing there", max_seqs=4)


@pytest.fixture(scope="module")
def without_tokenizer(tiny_folder):
    return make_llm(tiny_folder, skip_tokenizer_init=True, config=verax.EngineConfig(max_num_seqs=1), max_num_seqs=1)


def test_without_a_tokenizer_token_ids_are_served_and_texts_are_empty(without_tokenizer, llm):
    ours = without_tokenizer.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0]
    assert ours.text == ""
    assert ours.token_ids == llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_without_a_tokenizer_the_checkpoints_own_ends_still_count(without_tokenizer):
    assert without_tokenizer.engine.eos_token_ids == {0, 1}


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("abc"),
        lambda llm: llm.generate([[5]], verax.SamplingParams(stop=["x"])),
        lambda llm: llm.chat([{"role": "user", "content": "abc"}]),
        lambda llm: llm.stream([5, 6]),
    ],
    ids=["text", "stop", "chat", "stream"],
)
def test_without_a_tokenizer_what_needs_text_names_the_option(without_tokenizer, call):
    with pytest.raises(InvalidParameterError, match="skip_tokenizer_init"):
        call(without_tokenizer)
    assert not without_tokenizer.has_unfinished_requests


def test_a_folder_without_a_tokenizer_names_the_option(tiny_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    with pytest.raises(CheckpointError, match="skip_tokenizer_init=True"):
        make_llm(tmp_path)
