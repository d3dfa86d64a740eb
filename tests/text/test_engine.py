"""Engines of tiny random models: the same tokens whatever happens around a request."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.support.engine import (
    GREEDY,
    PROMPTS,
    RANDOM,
    RNG,
    add_slowly,
    alone,
    few_blocks,
    finish,
    generate,
    greedy_answer,
    nothing_compiles,
    plain_scores,
    tokens,
)
from tests.support.invariants import check_engine
from tests.support.tiny import HYBRID, WINDOWED, tiny_checkpoint
from tests.text.conftest import make_llm
from verax.errors import InvalidParameterError, RequestRefusedError
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step.runner import ModelRunner

PENALTIES = SamplingParams(temperature=0, max_tokens=20, frequency_penalty=2.0, repetition_penalty=1.3, ignore_eos=True)
SAMPLING = pytest.mark.parametrize("params", [GREEDY, RANDOM, PENALTIES], ids=["greedy", "sampled", "penalties"])

MODELS = {
    "full attention": ("qwen3", {}, (32,)),
    "sliding windows": ("qwen3", WINDOWED, (26, 13)),
    "recurrent layers": ("qwen3_5_text", HYBRID, (32,)),
}
"""Family and changes of a tiny model, and numbers of blocks with which a few long sequences preempt each other."""


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """An engine of each model, and its few blocks."""
    family, changes, blocks = MODELS[request.param]
    return make_llm(tiny_checkpoint(tmp_path_factory.mktemp("model") / family, family=family, **changes)), blocks


def test_greedy_tokens_equal_the_model_without_an_engine(model):
    # The budget is 32 tokens: prompts of 33 to 64 are computed in two or three chunks.
    llm, scores = model[0], plain_scores(model[0])
    assert [alone(llm, prompt) for prompt in PROMPTS] == [greedy_answer(scores, prompt) for prompt in PROMPTS]


@SAMPLING
def test_neither_a_crowd_nor_preemption_nor_others_that_run_change_a_token(model, params):
    llm, blocks = model
    expected = [alone(llm, prompt, params) for prompt in PROMPTS]
    assert tokens(generate(llm, PROMPTS, params)) == add_slowly(llm, PROMPTS, params) == expected
    assert llm.engine.scheduler.blocks.usage == 0
    with few_blocks(llm, *blocks) as scheduler:
        assert tokens(generate(llm, PROMPTS, params)) == expected
    assert scheduler.num_preemptions > 0


def test_nothing_compiles_after_the_start(model):
    llm, _ = model
    odd = SamplingParams(
        n=2, temperature=0.9, logprobs=3, prompt_logprobs=2, frequency_penalty=0.5, logit_bias={5: 2.0}, max_tokens=9
    )
    with nothing_compiles(llm):
        for batch in (PROMPTS, PROMPTS[:1], PROMPTS[3:8]):
            for params in (GREEDY, RANDOM, odd):
                generate(llm, batch, params)


def test_samples_of_one_prompt_and_seeds_differ_and_equal_seeds_agree(model):
    def params(seed, n=1):
        return SamplingParams(n=n, temperature=1.5, seed=seed, max_tokens=12, ignore_eos=True)

    llm, _ = model
    samples = [sample.token_ids for sample in generate(llm, PROMPTS[2:3], params(3, n=3))[0].outputs]
    assert len(set(samples)) == 3
    assert alone(llm, PROMPTS[2], params(3)) == samples[0]
    assert alone(llm, PROMPTS[2], params(4)) not in samples


def test_logprobs_are_the_models_own(model):
    llm, scores, prompt = model[0], plain_scores(model[0]), PROMPTS[4][:60]
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=4, prompt_logprobs=2, ignore_eos=True)
    for _ in range(2):  # the second time most of the prompt is cached, and must be scored all the same
        output = generate(llm, [prompt], params)[0]
        sample = output.outputs[0]
        exact = np.asarray(jax.nn.log_softmax(scores([*prompt, *sample.token_ids])))
        for i, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
            row = exact[len(prompt) + i - 1]
            assert set(entry) == set(np.argsort(-row)[:4].tolist()) | {token}
            assert entry[token].rank == 1
            for other, value in entry.items():
                assert abs(value.logprob - row[other]) < 1e-3
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for i in range(1, len(prompt)):
            entry, row = output.prompt_logprobs[i], exact[i - 1]
            assert abs(entry[prompt[i]].logprob - row[prompt[i]]) < 1e-3
            assert entry[prompt[i]].rank == 1 + (row > row[prompt[i]]).sum()
            assert len(entry) in (2, 3)
        chosen = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert abs(sample.cumulative_logprob - sum(chosen)) < 1e-6


def test_a_step_with_prompts_may_have_as_many_rows_as_tokens(llm, tiny_folder):
    wide = make_llm(tiny_folder, max_num_seqs=32)
    assert any(not shape.decode and shape.rows == shape.tokens for shape in wide.engine.runner.config.shapes)
    assert tokens(generate(wide, PROMPTS)) == [alone(llm, prompt) for prompt in PROMPTS]


def test_a_prefix_hit_changes_no_token_and_finds_an_earlier_answer(llm):
    prompt = RNG.integers(3, 200, 41).tolist()
    first, second = (generate(llm, [prompt])[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    again = generate(llm, [[*prompt, *first.outputs[0].token_ids, 5, 6]])[0]
    assert again.num_cached_tokens >= 56


def test_seeds_have_64_bits_and_top_p_of_0_is_greedy(llm):
    def drawn(**params):
        return alone(llm, PROMPTS[2], SamplingParams(max_tokens=12, ignore_eos=True, **params))

    assert len({drawn(temperature=1.5, seed=5 + offset) for offset in (0, 2**31, 2**32, 2**62)}) == 4
    assert drawn(temperature=1.5, top_p=0, seed=5) == drawn(temperature=0)


def test_each_position_draws_its_own_number(llm):
    for temperature in (1000.0, 1e300):  # nearly uniform
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
        assert len(set(alone(llm, PROMPTS[0], params))) > 25


def test_unseeded_requests_repeat_with_the_engine_seed_and_not_within_it(tiny_folder):
    params = SamplingParams(temperature=1.5, max_tokens=10, ignore_eos=True)
    a, b = (tokens(generate(make_llm(tiny_folder, seed=11), [PROMPTS[1]] * 2, params)) for _ in range(2))
    assert a == b
    assert a[0] != a[1]


def test_large_steps_are_compiled_but_not_run_at_the_start_on_a_cpu(tiny_folder, monkeypatch):
    run = []
    run_padding = ModelRunner._run_padding
    monkeypatch.setattr(ModelRunner, "_run_padding", lambda self, shape: run.append(shape) or run_padding(self, shape))
    llm = make_llm(tiny_folder, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128)
    runner = llm.engine.runner
    assert {shape.tokens: shape in run for shape in runner.config.shapes} == {1: True, 2: True, 32: True, 128: False}
    with nothing_compiles(llm):
        generate(llm, [[7] * 100])
    assert runner.num_compiled() == len(runner.config.shapes) + 1


def test_aborted_requests_leave_the_others_alone(llm):
    expected = [alone(llm, prompt) for prompt in PROMPTS[:3]]
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    for _ in range(4):
        llm.step()
    cut = llm.abort(ids[1]).outputs[0]
    assert cut.finish_reason == "abort"
    assert cut.token_ids == expected[1][: len(cut.token_ids)]
    assert {output.request_id: output.outputs[0].token_ids for output in finish(llm)} == {
        ids[0]: expected[0],
        ids[2]: expected[2],
    }
    assert llm.abort(ids[1]) is None
    assert llm.engine.scheduler.blocks.usage == 0


def test_generate_leaves_requests_that_others_drive_to_them(llm):
    mine = llm.add_request(PROMPTS[1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    generate(llm, PROMPTS[3:5])
    assert [output.request_id for output in finish(llm)] == [mine]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), (list(range(3, 99)), "max_model_len"), ([3, 10**6], "vocabulary"), ([-1], "vocabulary")],
)
def test_impossible_prompts_are_refused_and_nothing_else_stops(llm, prompt, message):
    running = llm.add_request(PROMPTS[1], GREEDY)
    with pytest.raises(RequestRefusedError, match=message):
        generate(llm, [PROMPTS[2], prompt])
    assert [output.request_id for output in finish(llm)] == [running]


def test_the_longest_possible_request_fills_the_context(llm):
    prompt = RNG.integers(3, 200, 95).tolist()
    for length, params in ((95, GREEDY), (90, SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))):
        output = generate(llm, [prompt[:length]], params)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (96 - length, "length")


def test_stop_tokens_end_a_sequence_and_min_tokens_holds_them_back(llm):
    free = alone(llm, PROMPTS[2])
    stop = free[5]
    assert stop not in free[:5]
    ending = dict(temperature=0, max_tokens=20, stop_token_ids=[stop], ignore_eos=True)
    cut = generate(llm, [PROMPTS[2]], SamplingParams(**ending))[0].outputs[0]
    assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == (free[:6], "stop", stop)
    held = alone(llm, PROMPTS[2], SamplingParams(min_tokens=9, **ending))
    assert stop not in held[:9]
    assert held[:5] == free[:5]
    assert len(held) >= 9


def test_logit_bias_forces_and_forbids(llm):
    free = alone(llm, PROMPTS[2])
    forced, without = (
        alone(llm, PROMPTS[2], SamplingParams(temperature=0, max_tokens=8, logit_bias=bias, ignore_eos=True))
        for bias in ({9: 100.0}, {free[0]: -100.0})
    )
    assert forced == (9,) * 8
    assert free[0] not in without


def test_prompt_shapes_are_told_apart(llm):
    assert len(llm.generate("abc", GREEDY)) == 1
    assert len(llm.generate([5, 6, 7], GREEDY)) == 1
    assert len(llm.generate(["abc", [5, 6]], GREEDY)) == 2
    assert llm.generate([], GREEDY) == []
    named = llm.generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt": "abc"}], GREEDY)
    assert tokens(named) == [alone(llm, [5, 6, 7], GREEDY), alone(llm, "abc", GREEDY)]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, None, "prompts: expected texts or lists of token ids"),
        (5, None, "prompts: expected texts or lists of token ids"),
        ({"text": "abc"}, None, "prompts: .*prompt_token_ids"),
        (["a", "b"], [GREEDY], "sampling_params: 1 given for 2"),
        *(([[5, wrong]], GREEDY, "prompt: expected token ids") for wrong in (1.5, "6", None, float("nan"), [6], True)),
        (b"abc", GREEDY, "prompts: expected texts or lists"),
        ([b"abc"], GREEDY, "prompt: expected a text, token ids or messages"),
        (["a\ud800b"], GREEDY, "prompt: .*half of a character"),
        ([[5, 6]], {"temperature": 0}, "sampling_params: expected SamplingParams"),
        ([[5, 6]], "greedy", "sampling_params: expected SamplingParams"),
        ([[5, 6]], [None], "sampling_params: expected SamplingParams"),
    ],
)
def test_what_is_not_a_prompt_or_parameters_is_refused(llm, prompts, params, message):
    with pytest.raises((InvalidParameterError, RequestRefusedError), match=message):
        llm.generate(prompts, params)


def test_an_unfinished_stream_does_not_disturb_the_end_of_the_program(tiny_folder):
    program = f"""
from verax import LLM
llm = LLM({str(tiny_folder)!r}, max_num_seqs=1, max_model_len=64)
pieces = llm.stream("abc")
next(pieces)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        RANDOM,
        PENALTIES,
        SamplingParams(n=2, temperature=1.3, seed=6, max_tokens=20, stop=["a", "or"], min_tokens=5),
    ],
    ids=["greedy", "sampled", "penalties", "stop strings"],
)
def test_a_request_continues_after_its_answer_so_far(llm, params):
    (expected,) = llm.generate([PROMPTS[2]], params)
    answers = [sample.token_ids for sample in expected.outputs]
    for cut in range(max(map(len, answers)) + 1):
        llm.add_request(PROMPTS[2], params, output_token_ids=[answer[:cut] for answer in answers])
        (output,) = finish(llm)
        assert output.outputs == expected.outputs
        assert output.num_cached_tokens <= len(PROMPTS[2])


def test_answers_so_far_survive_preemption(llm):
    expected = [alone(llm, prompt, RANDOM) for prompt in PROMPTS]
    with few_blocks(llm, 32) as scheduler:
        names = [
            llm.add_request(prompt, RANDOM, output_token_ids=[answer[:7]])
            for prompt, answer in zip(PROMPTS, expected, strict=True)
        ]
        done = {output.request_id: output for output in finish(llm)}
    assert tokens(done[name] for name in names) == expected
    assert scheduler.num_preemptions > 0


def test_only_new_tokens_have_log_probabilities(llm):
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=1, ignore_eos=True)
    (expected,) = llm.generate([PROMPTS[2]], params)
    llm.add_request(PROMPTS[2], params, output_token_ids=[expected.outputs[0].token_ids[:4]])
    (output,) = finish(llm)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert [list(entry) for entry in output.outputs[0].logprobs] == [
        list(entry) for entry in expected.outputs[0].logprobs[4:]
    ]


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ([], InvalidParameterError, "output_token_ids: expected an answer for each of 1, got 0"),
        ([[5], [6]], InvalidParameterError, "output_token_ids: expected an answer for each of 1, got 2"),
        ([[5, 10**6]], RequestRefusedError, "output_token_ids: token 1000000 is outside"),
        ([[5] * 21], InvalidParameterError, "output_token_ids: the answer of sample 0 ends before"),
        ([[5, 1.5]], InvalidParameterError, "output_token_ids: expected token ids"),
        ([5], InvalidParameterError, "output_token_ids: expected token ids"),
    ],
)
def test_an_impossible_answer_so_far_is_refused_and_leaves_nothing(llm, answers, error, message):
    with pytest.raises(error, match=message):
        llm.add_request(PROMPTS[2], GREEDY, output_token_ids=answers)
    assert not llm.has_unfinished_requests
    check_engine(llm.engine)


def test_a_stop_token_that_is_kept_is_streamed_too(llm):
    params = SamplingParams(
        temperature=1.4, seed=8, max_tokens=60, stop_token_ids=list(range(60, 110)), include_stop_str_in_output=True
    )
    (expected,) = llm.generate(["once upon"], params)
    assert expected.outputs[0].finish_reason == "stop"
    assert "".join(llm.stream("once upon", params)) == expected.outputs[0].text != ""


@pytest.mark.parametrize("num_pieces", [0, 1])
def test_a_stream_that_is_dropped_leaves_nothing_in_the_engine(llm, num_pieces):
    expected = llm.generate(PROMPTS[2], GREEDY)[0].outputs
    pieces = llm.stream(PROMPTS[1], GREEDY)
    for _ in range(num_pieces):
        assert next(pieces)
    del pieces
    assert not llm.has_unfinished_requests
    assert llm.generate(PROMPTS[2], GREEDY)[0].outputs == expected
    check_engine(llm.engine)


def test_a_stream_that_is_closed_after_one_piece_leaves_the_other_requests(llm):
    expected = llm.generate(PROMPTS[2], GREEDY)[0].outputs
    pieces, other = llm.stream(PROMPTS[1], GREEDY), llm.add_request(PROMPTS[2], GREEDY)
    next(pieces)
    pieces.close()
    assert {output.request_id: output.outputs for output in finish(llm)} == {other: expected}
