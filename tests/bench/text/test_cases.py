"""The text benchmark on a tiny checkpoint: the work is what it says, nothing compiles while timed, reports hold."""

import json
import math
import sys

import pytest

from tests.support.tiny import tiny_checkpoint
from verax import cli
from verax.bench.results import markdown
from verax.bench.text.cases import bench_text
from verax.bench.text.workload import Workload, nano_vllm, prompt, repeat, short_prompts
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError


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


def test_reading_a_prompt_is_a_case_whose_rate_counts_the_prompt(folder):
    assert prompt(1000).prompt_tokens == 512
    result = bench_text(folder, lambda vocab: prompt(vocab, tokens=24), runs=2, warmup=0, dtype="float32")
    side = result["cases"][0]["sides"]["verax"]
    assert (result["settings"]["prompt_tokens"], result["settings"]["new_tokens"]) == (24, 1)
    assert side["rate"] == 24 / side["median_s"]
    assert result["name"].endswith("-prompt-float32-24-tokens")


def test_an_engine_with_drafts_is_compared_with_itself_without_them(folder):
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    result = bench_text(
        folder,
        lambda vocab: repeat(vocab, max_tokens=40, trained=False),
        runs=2,
        warmup=0,
        dtype="float32",
        speculative_config=config,
    )
    assert set(result["cases"][0]["ratios"]) == {"verax without drafts"}
    assert result["settings"]["speculative_config"] == json.loads(config)
    drafts = result["spec_decode"]
    assert drafts["num_draft_tokens"] == drafts["num_accepted_tokens"] > 20
    assert result["name"].endswith("-repeat-float32-drafts")


def test_a_repeating_prompt_is_the_same_tokens_over_and_over():
    (text,) = repeat(1000).prompts
    assert text == text[:48] * 4
    assert not repeat(1000).params()[0].logit_bias
    assert dict(repeat(1000, trained=False).params()[0].logit_bias) == {text[0]: 100.0}


def test_quantised_weights_are_compared_with_our_own_unquantised_ones(folder):
    workload = Workload("short-prompts", ((5, 6, 7),), (4,), 0.0)
    result = bench_text(
        folder, lambda _: workload, runs=1, warmup=0, dtype="float32", quantization="int8", against=("verax",)
    )
    assert set(result["cases"][0]["sides"]) == {"verax float32", "verax"}
    assert set(result["cases"][0]["ratios"]) == {"verax float32"}


def test_the_result_counts_what_was_done(result):
    assert result["settings"]["new_tokens"] == 10
    assert result["settings"]["prompt_tokens"] == 8
    assert result["start_up"]["compiled_during_runs"] == 0
    side = result["cases"][0]["sides"]["verax"]
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
    assert (
        0
        < work["fraction_of_limit"]
        == pytest.approx(work["limit_s"] / result["cases"][0]["sides"]["verax"]["median_s"])
    )


def test_steps_are_as_many_as_the_longest_answer_or_all_in_turn_need():
    workload = Workload("short-prompts", ((5,), (6,), (7,)), (4, 6, 5), 0.7)
    assert [workload.steps(n) for n in (1, 2, 3)] == [15, 8, 6]


def test_the_decode_breakdown_adds_up_to_the_step(result):
    parts = result["decode_breakdown"]
    assert sum(parts["parts_ms"].values()) == pytest.approx(parts["whole_ms"])
    assert parts["weight_gb_per_s"] == pytest.approx(1e3 * parts["weight_gb"] / parts["whole_ms"])


def test_the_page_has_the_rate_and_the_parts_of_a_step(result):
    page = markdown(result)
    assert f"{result['cases'][0]['sides']['verax']['rate']:.1f}" in page
    assert "| attention |" in page


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
    with pytest.raises(InvalidParameterError, match=r"against: expected transformers, llama.cpp, verax, got 'vllm'"):
        bench_text(None, short_prompts, runs=1, warmup=0, against=("vllm",))
    with pytest.raises(InvalidParameterError, match=r"against: verax is our side unquantised; give quantization"):
        bench_text(None, short_prompts, runs=1, warmup=0, against=("verax",))
    with pytest.raises(InvalidParameterError, match=r"dtype: expected bfloat16, float32, got 'int8'"):
        bench_text(None, short_prompts, runs=1, warmup=0, dtype="int8")
    with pytest.raises(InvalidParameterError, match=r"shapes: expected qwen3, qwen3-8b, hybrid, moe, got 'llama'"):
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
