"""The text benchmark on a tiny checkpoint: the work is what it says, nothing compiles while timed, reports hold."""

import json
import math
import sys

import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint
from verax import cli
from verax.bench.results import markdown, model_name, write
from verax.bench.text import page
from verax.bench.text import run as text
from verax.bench.text.run import bench_text
from verax.bench.text.workload import Workload, nano_vllm, prompt, repeat, short_prompts
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError
from verax.shapes import QWEN3_0_6B


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def result(folder):
    workload = Workload("short-prompts", ((5, 6, 7), (9, 8, 7, 6, 5)), (4, 6), 0.7)
    return bench_text(folder, lambda vocab_size: workload, runs=2, warmup=1, dtype="float32", decode_breakdown=True)


def test_short_prompts_are_four_prompts_of_a_hundred_tokens():
    workload = short_prompts(1000)
    assert len(workload.prompts) == 4
    assert workload.max_tokens == (100,) * 4
    assert workload.temperature == 0.7
    assert workload.new_tokens == 400
    assert all(0 <= token < 1000 for prompt in workload.prompts for token in prompt)


def test_nano_vllms_case_has_its_lengths_and_scales():
    workload = nano_vllm(151936)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert len(lengths) == 256
    assert 100 <= min(lengths) < 150
    assert 970 < max(lengths) <= 1024
    assert all(100 <= count <= 1024 for count in workload.max_tokens)
    small = nano_vllm(100, requests=8, scale=0.1)
    assert max(len(prompt) for prompt in small.prompts) <= 102
    assert all(token < 100 for prompt in small.prompts for token in prompt)


def test_reading_a_prompt_is_a_case_whose_rate_counts_the_prompt(folder, tmp_path):
    assert prompt(1000).prompt_tokens == 512
    result = bench_text(folder, lambda vocab: prompt(vocab, tokens=24), runs=2, warmup=0, dtype="float32")
    side = result["sides"]["verax"]
    assert (result["settings"]["prompt_tokens"], result["settings"]["new_tokens"]) == (24, 1)
    assert side["rate"] == 24 / side["median_s"]
    assert "Tokens are the prompts'." in markdown(result)
    assert write(result, tmp_path).name.endswith("-prompt-float32-24-tokens.json")


def test_an_engine_with_drafts_runs_beside_itself_without_them(folder, tmp_path):
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    result = bench_text(
        folder,
        lambda vocab: repeat(vocab, max_tokens=40, trained=False),
        runs=2,
        warmup=0,
        dtype="float32",
        speculative_config=config,
    )
    assert set(result["ratios"]) == {"verax / verax without drafts"}
    assert result["settings"]["speculative_config"] == json.loads(config)
    drafts = result["spec_decode"]
    assert drafts["num_draft_tokens"] == drafts["num_accepted_tokens"] > 20
    assert "held (100%)" in markdown(result)
    assert write(result, tmp_path).name.endswith("-repeat-float32-drafts.json")


def test_a_repeating_prompt_is_the_same_tokens_over_and_over():
    (text,) = repeat(1000).prompts
    assert text == text[:48] * 4
    assert not repeat(1000).params()[0].logit_bias
    assert dict(repeat(1000, trained=False).params()[0].logit_bias) == {text[0]: 100.0}


def test_quantised_weights_run_beside_our_own_unquantised_ones(folder):
    workload = Workload("short-prompts", ((5, 6, 7),), (4,), 0.0)
    result = bench_text(
        folder, lambda _: workload, runs=1, warmup=0, dtype="float32", quantization="int8", against=("verax",)
    )
    assert set(result["sides"]) == {"verax float32", "verax"}
    assert set(result["ratios"]) == {"verax / verax float32"}


def test_the_result_counts_what_was_done(result):
    assert result["settings"]["new_tokens"] == 10
    assert result["settings"]["prompt_tokens"] == 8
    assert result["start_up"]["compiled_during_runs"] == 0
    side = result["sides"]["verax"]
    assert len(side["seconds"]) == 2
    assert side["rate"] == 10 / side["median_s"]


def test_what_our_side_did_is_counted_against_the_limit(result, folder):
    work = result["work"]
    shapes = [Checkpoint.open(folder).shape(name) for name in Checkpoint.open(folder).names()]
    matrices = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    head = math.prod(Checkpoint.open(folder).shape("model.embed_tokens.weight"))
    assert work["flops"] == 2 * ((matrices - head) * (7 + 5 + 3 + 1) + head * 10)  # the head where a token is drawn
    assert work["steps"] == 6
    assert work["bytes_moved"] == pytest.approx(6e9 * result["start_up"]["weights_gb"])
    assert 0 < work["fraction_of_limit"] == pytest.approx(work["limit_s"] / result["sides"]["verax"]["median_s"])


def test_steps_are_those_of_the_longest_answer_or_of_all_in_turn():
    workload = Workload("short-prompts", ((5,), (6,), (7,)), (4, 6, 5), 0.7)
    assert [workload.steps(n) for n in (1, 2, 3)] == [15, 8, 6]


def test_the_decode_breakdown_adds_up_to_the_step(result):
    parts = result["decode_breakdown"]
    assert sum(parts["parts_ms"].values()) == pytest.approx(parts["whole_ms"])
    assert parts["weight_gb_per_s"] == pytest.approx(1e3 * parts["weight_gb"] / parts["whole_ms"])


def test_reports_are_written_beside_each_other(result, tmp_path):
    path = write(result, tmp_path / "results")
    assert json.loads(path.read_text())["sides"] == result["sides"]
    page = path.with_suffix(".md").read_text()
    assert f"{result['sides']['verax']['rate']:.1f}" in page
    assert result["machine"]["jax"] in page
    assert "| attention |" in page


def test_ratios_appear_when_there_are_two_sides(result):
    both = {**result, "sides": {**result["sides"], "transformers batched": result["sides"]["verax"]}}
    both["ratios"] = {"verax / transformers batched": 1.5}
    assert "verax / transformers batched: 1.50x" in markdown(both)


def test_without_a_model_the_weights_are_random_in_the_real_shapes():
    config = {**QWEN3_0_6B, "num_hidden_layers": 1, "vocab_size": 512}
    with text.checkpoint_folder(None, "bfloat16", config) as folder:
        opened = Checkpoint.open(folder)
        assert opened.info("model.layers.0.mlp.down_proj.weight").shape == (1024, 3072)
        spread = np.std(np.asarray(opened.read("model.layers.0.mlp.down_proj.weight"), np.float32))
        assert spread == pytest.approx(3072**-0.5, rel=0.02)
    assert not folder.exists()


def test_experts_that_are_not_chosen_are_not_counted(tmp_path):
    sizes = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    folder = tiny_checkpoint(tmp_path, family="qwen3_moe", **sizes)
    workload = Workload("short-prompts", ((5, 6, 7),), (4,), 0.7)
    work = bench_text(str(folder), lambda vocab: workload, runs=1, warmup=0, dtype="float32")["work"]
    experts, attention, router = 3 * 32 * 64, 2 * 64 * 64 + 2 * 64 * 32, 8 * 64
    layers, head = 2 * (2 * experts + attention + router), 320 * 64
    assert work["flops"] == 2 * (layers * 6 + head * 4)
    assert work["bytes_moved"] == pytest.approx(4 * 4 * (layers + head), rel=0.01)  # four steps, and norms


def test_an_unknown_baseline_or_dtype_is_refused_before_any_work():
    with pytest.raises(
        InvalidParameterError, match=r"against: expected transformers or llama.cpp or verax, got 'vllm'"
    ):
        bench_text(None, short_prompts, runs=1, warmup=0, against=("vllm",))
    with pytest.raises(InvalidParameterError, match=r"against: verax is our side unquantised; give quantization"):
        bench_text(None, short_prompts, runs=1, warmup=0, against=("verax",))
    with pytest.raises(InvalidParameterError, match=r"dtype: expected one of bfloat16, float32, got 'int8'"):
        bench_text(None, short_prompts, runs=1, warmup=0, dtype="int8")
    with pytest.raises(
        InvalidParameterError, match=r"shapes: expected one of qwen3, qwen3-8b, hybrid, moe, got 'llama'"
    ):
        bench_text(None, short_prompts, runs=1, warmup=0, shapes="llama")


@pytest.mark.parametrize(
    "arguments", [["--workload", "mlperf"], ["--runs", "0"], ["--requests", "0"], ["--scale", "0"]]
)
def test_the_command_refuses_nonsense_in_one_line(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["verax", "bench", "text", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_prints_json_for_scripts(monkeypatch, capsys, folder):
    arguments = ["--model", folder, "--requests", "2", "--max-tokens", "3", "--runs", "1", "--warmup", "0", "--json"]
    monkeypatch.setattr(sys, "argv", ["verax", "bench", "text", "--dtype", "float32", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["settings"]["new_tokens"] == 6


def test_a_result_names_a_checkpoint_without_its_folders(tmp_path):
    file = tmp_path / "Small-Q4_K_M.gguf"
    file.touch()
    assert model_name(str(file)) == "Small-Q4_K_M.gguf"
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    settings = {"dtype": "bfloat16", "quantization": None, "kv_cache_dtype": "auto", "requests": 4}
    result = {"settings": {**settings, "model": model_name(str(file)), "shapes": None, "workload": "short-prompts"}}
    assert page.slug(result) == ["small-q4_k_m", "short-prompts", "bfloat16"]
