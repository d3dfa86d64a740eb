"""The text benchmark on a tiny checkpoint: the work is what it says, nothing compiles while timed, reports hold."""

import json
import math

import pytest

from tests.support.tiny import tiny_checkpoint
from verax.bench.settings import TextSettings
from verax.bench.text.cases import Workload, bench_text, make_workload
from verax.checkpoint import Checkpoint
from verax.shapes import QWEN3_0_6B, SHAPES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def measure(folder, custom=None, /, **options):
    return bench_text(TextSettings(model=folder, **{"runs": 1, "warmup": 0, "dtype": "float32", **options}), custom)


def drawn(vocab_size, **options):
    return make_workload(TextSettings(**options), vocab_size)


def test_nano_vllms_case_has_its_lengths_and_scales():
    workload = drawn(151936, workload="nano-vllm")
    lengths = [len(prompt) for prompt in workload.prompts]
    assert len(lengths) == 256
    assert 100 <= min(lengths) < 150
    assert 970 < max(lengths) <= 1024
    assert all(100 <= count <= 1024 for count in workload.max_tokens)
    small = drawn(100, workload="nano-vllm", requests=8, scale=0.1)
    assert max(len(prompt) for prompt in small.prompts) <= 102
    assert all(token < 100 for prompt in small.prompts for token in prompt)


def test_a_repeating_prompt_is_the_same_tokens_over_and_over():
    (text,) = drawn(1000, workload="repeat", model="trained").prompts
    assert text == text[:48] * 4
    assert not drawn(1000, workload="repeat", model="trained").params()[0].logit_bias
    assert dict(drawn(1000, workload="repeat").params()[0].logit_bias) == {text[0]: 100.0}


def test_reading_a_prompt_is_a_case_whose_rate_counts_the_prompt(folder, bench):
    assert drawn(1000, workload="prompt").prompt_tokens == 512
    work = ("--workload", "prompt", "--prompt-tokens", 24, "--dtype", "float32", "--runs", 2, "--warmup", 0)
    status, out, _ = bench("text", "--model", folder, *work, "--json")
    result = json.loads(out)
    side = result["cases"][0]["sides"]["verax"]
    assert (status, result["settings"]["prompt_tokens"], result["settings"]["new_tokens"]) == (0, 24, 1)
    assert side["rate"] == 24 / side["median_s"]
    assert result["name"].endswith("-prompt-float32-24-tokens")


def test_without_a_model_the_weights_are_random(monkeypatch):
    small = {**QWEN3_0_6B, "num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64}
    monkeypatch.setitem(SHAPES, "qwen3-8b", ("small shapes", small))
    result = measure(None, Workload("short-prompts", ((5, 6, 7),), (4,), 0.0), shapes="qwen3-8b")
    assert (result["settings"]["model"], result["settings"]["shapes"]) == ("random weights, small shapes", "qwen3-8b")
    assert result["name"] == "short-prompts-qwen3-8b-float32-1-prompt"


def test_an_engine_with_drafts_is_compared_with_itself_without_them(folder):
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    result = measure(folder, drawn(320, workload="repeat", max_tokens=40), speculative_config=config)
    assert set(result["cases"][0]["ratios"]) == {"verax without drafts"}
    assert result["settings"]["speculative_config"].items() >= json.loads(config).items()
    drafts = result["spec_decode"]
    assert drafts["num_draft_tokens"] == drafts["num_accepted_tokens"] > 20
    assert result["name"].endswith("-repeat-float32-drafts")


@pytest.fixture(scope="module")
def result(folder):
    """Quantised weights next to our own unquantised ones."""
    workload = Workload("short-prompts", ((5, 6, 7), (9, 8, 7, 6, 5)), (4, 6), 0.7)
    return measure(folder, workload, runs=2, warmup=1, quantization="int8", against="verax")


def test_the_result_counts_what_was_done_against_the_limit(result, folder):
    assert set(result["cases"][0]["ratios"]) == {"verax float32"}
    assert (result["settings"]["prompt_tokens"], result["settings"]["new_tokens"]) == (8, 10)
    assert result["start_up"]["compiled_during_runs"] == 0
    side, work = result["cases"][0]["sides"]["verax"], result["work"]
    assert (len(side["seconds"]), side["rate"]) == (2, 10 / side["median_s"])
    opened = Checkpoint.open(folder)
    matrices = sum(math.prod(opened.shape(name)) for name in opened.names() if len(opened.shape(name)) == 2)
    head = math.prod(opened.shape("model.embed_tokens.weight"))
    assert work["flops"] == 2 * ((matrices - head) * (7 + 5 + 3 + 1) + head * 10)  # the head where a token is drawn
    assert work["steps"] == 6
    assert work["bytes_moved"] == pytest.approx(6e9 * result["start_up"]["weights_gb"])
    assert 0 < work["fraction_of_limit"] == pytest.approx(work["limit_s"] / side["median_s"])


def test_a_prediction_head_is_not_counted_in_steps_without_drafts(tmp_path):
    folder = str(tiny_checkpoint(tmp_path, prediction_head=True, num_nextn_predict_layers=1))
    workload = Workload("short-prompts", ((5, 6, 7),), (4,), 0.0)
    plain, drafted = (measure(folder, workload, speculative_config=one) for one in (None, '{"method": "mtp"}'))
    assert drafted["start_up"]["weights_gb"] > 1.1 * plain["start_up"]["weights_gb"]
    for what in ("flops", "bytes_moved"):
        assert drafted["work"][what] == plain["work"][what]
    sides = drafted["cases"][0]["sides"]
    assert "limit_s" not in sides["verax"]
    side = sides["verax without drafts"]
    assert side["fraction_of_limit"] == pytest.approx(side["limit_s"] / side["median_s"])


def test_experts_that_are_not_chosen_are_not_counted(tmp_path):
    sizes = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    folder = tiny_checkpoint(tmp_path, family="qwen3_moe", **sizes)
    workload = Workload("short-prompts", ((5, 6, 7),), (4,), 0.7)
    work = measure(str(folder), workload)["work"]
    experts, attention, router = 3 * 32 * 64, 2 * 64 * 64 + 2 * 64 * 32, 8 * 64
    layers, head = 2 * (2 * experts + attention + router), 320 * 64
    assert work["flops"] == 2 * (layers * 6 + head * 4)
    assert work["bytes_moved"] == pytest.approx(4 * 4 * (layers + head), rel=0.01)  # four steps, and norms
