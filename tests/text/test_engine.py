"""The engine on a tiny random model: the same tokens whatever happens around a request."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.support.engine import alone, plain_scores, tokens
from tests.text.conftest import make_llm
from verax.errors import InvalidParameterError, RequestRefusedError
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step.runner import ModelRunner

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 200, n).tolist() for n in (1, 5, 16, 33, 64, 7, 40, 12, 3, 50)]


@pytest.fixture(scope="module")
def plain_logits(llm):
    return plain_scores(llm)


def test_greedy_tokens_are_those_of_the_model_without_an_engine(llm, plain_logits):
    for prompt in PROMPTS[:5]:
        text = list(prompt)
        for token in alone(llm, prompt, GREEDY):
            assert token == plain_logits(text)[-1].argmax()
            text.append(token)


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_served_alone_equals_served_in_a_crowd(llm, params):
    assert tokens(llm.generate(PROMPTS, params, use_tqdm=False)) == [alone(llm, p, params) for p in PROMPTS]


def test_a_step_with_prompts_may_have_as_many_rows_as_tokens(llm, tiny_folder):
    wide = make_llm(tiny_folder, max_num_seqs=32)
    assert any(not shape.decode and shape.rows == shape.tokens for shape in wide.engine.runner.config.shapes)
    assert tokens(wide.generate(PROMPTS, GREEDY, use_tqdm=False)) == [alone(llm, p, GREEDY) for p in PROMPTS]


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_preemption_changes_no_token(llm, crowded_llm, params):
    expected = [alone(llm, p, params) for p in PROMPTS]
    crowded_llm.engine.scheduler.blocks.reset_prefix_cache()
    before = preemptions(crowded_llm)
    assert tokens(crowded_llm.generate(PROMPTS, params, use_tqdm=False)) == expected
    assert preemptions(crowded_llm) > before
    crowded_llm.engine.check()


def preemptions(llm):
    return llm.engine.scheduler.num_preemptions


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_a_prefix_hit_changes_no_token(llm, params):
    prompt = RNG.integers(3, 200, 41).tolist()
    first = llm.generate([prompt], params, use_tqdm=False)[0]
    second = llm.generate([prompt], params, use_tqdm=False)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_the_answer_to_an_earlier_turn_is_found_in_the_cache(llm):
    prompt = RNG.integers(3, 200, 21).tolist()
    answer = alone(llm, prompt, GREEDY)
    again = llm.generate([[*prompt, *answer, 5, 6]], GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens >= 36


def test_different_seeds_and_samples_differ_and_equal_seeds_agree(llm):
    several = llm.generate([PROMPTS[2]], SamplingParams(n=3, temperature=1.5, seed=3, max_tokens=12, ignore_eos=True))[
        0
    ]
    texts = [sample.token_ids for sample in several.outputs]
    assert len(set(texts)) == 3
    one = alone(llm, PROMPTS[2], SamplingParams(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True))
    assert one == texts[0]
    other = alone(llm, PROMPTS[2], SamplingParams(temperature=1.5, seed=4, max_tokens=12, ignore_eos=True))
    assert other not in texts


def test_each_position_draws_its_own_number(llm):
    nearly_uniform = SamplingParams(temperature=1000.0, seed=3, max_tokens=40, ignore_eos=True)
    drawn = alone(llm, PROMPTS[0], nearly_uniform)
    assert len(set(drawn)) > 25


def test_unseeded_requests_repeat_with_the_engine_seed_and_not_within_it(tiny_folder, llm):
    from tests.text.conftest import make_llm

    params = SamplingParams(temperature=1.5, max_tokens=10, ignore_eos=True)
    a, b = (make_llm(tiny_folder, seed=11).generate([PROMPTS[1]] * 2, params, use_tqdm=False) for _ in range(2))
    assert tokens(a) == tokens(b)
    assert tokens(a)[0] != tokens(a)[1]


def test_nothing_compiles_after_the_start(llm):
    runner = llm.engine.runner
    before = runner.num_compiled()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    odd = SamplingParams(
        n=2, temperature=0.9, logprobs=3, prompt_logprobs=2, frequency_penalty=0.5, logit_bias={5: 2.0}, max_tokens=9
    )
    for batch in (PROMPTS, PROMPTS[:1], PROMPTS[3:8]):
        for params in (GREEDY, RANDOM, odd):
            llm.generate(batch, params, use_tqdm=False)
    assert runner.num_compiled() == before
    assert compiled == []


def test_large_steps_are_compiled_but_not_run_at_the_start_on_a_cpu(tiny_folder, monkeypatch):
    run, compiled = [], []
    run_padding = ModelRunner._run_padding
    monkeypatch.setattr(ModelRunner, "_run_padding", lambda self, shape: run.append(shape) or run_padding(self, shape))
    llm = make_llm(tiny_folder, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128)
    runner = llm.engine.runner
    assert {shape.tokens: shape in run for shape in runner.config.shapes} == {1: True, 2: True, 32: True, 128: False}
    before = runner.num_compiled()
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    llm.generate([[7] * 100], GREEDY, use_tqdm=False)
    assert compiled == []
    assert runner.num_compiled() == before == len(runner.config.shapes) + 1


def test_aborted_requests_leave_the_others_alone(llm):
    expected = [alone(llm, p, GREEDY) for p in PROMPTS[:3]]
    ids = [llm.add_request(p, GREEDY) for p in PROMPTS[:3]]
    done = {}
    for step in range(100):
        if step == 4:
            cut = llm.abort(ids[1])
            assert cut.outputs[0].finish_reason == "abort"
            assert cut.outputs[0].token_ids == expected[1][: len(cut.outputs[0].token_ids)]
        done |= {o.request_id: o for o in llm.step() if o.finished}
        llm.engine.check()
        if not llm.has_unfinished_requests:
            break
    assert [done[i].outputs[0].token_ids for i in (ids[0], ids[2])] == [expected[0], expected[2]]
    assert llm.abort(ids[1]) is None
    assert llm.engine.scheduler.blocks.usage == 0


def test_requests_added_while_others_run_are_served(llm):
    expected = [alone(llm, p, GREEDY) for p in PROMPTS]
    got, ids = {}, []
    for step in range(300):
        if step % 3 == 0 and len(ids) < len(PROMPTS):
            ids.append(llm.add_request(PROMPTS[len(ids)], GREEDY))
        got |= {o.request_id: o.outputs[0].token_ids for o in llm.step() if o.finished}
        if len(got) == len(PROMPTS):
            break
    assert [got[i] for i in ids] == expected


def test_generate_leaves_requests_that_others_drive_to_them(llm):
    mine = llm.add_request(PROMPTS[1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    llm.generate(PROMPTS[3:5], GREEDY, use_tqdm=False)
    outputs = []
    while llm.has_unfinished_requests:
        outputs += llm.step()
    assert [o.request_id for o in outputs if o.finished] == [mine]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), (list(range(3, 99)), "max_model_len"), ([3, 10**6], "vocabulary"), ([-1], "vocabulary")],
)
def test_impossible_prompts_are_refused_and_nothing_else_stops(llm, prompt, message):
    running = llm.add_request(PROMPTS[1], GREEDY)
    with pytest.raises(RequestRefusedError, match=message):
        llm.generate([PROMPTS[2], prompt], GREEDY, use_tqdm=False)
    outputs = []
    while llm.has_unfinished_requests:
        outputs += [o for o in llm.step() if o.finished]
    assert [o.request_id for o in outputs] == [running]
    llm.engine.check()


def test_the_longest_possible_request_fills_the_context(llm):
    prompt = RNG.integers(3, 200, 95).tolist()
    output = llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    output = llm.generate([prompt[:90]], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (6, "length")


def test_stop_tokens_end_a_sequence_and_min_tokens_holds_them_back(llm):
    free = alone(llm, PROMPTS[2], GREEDY)
    stop = free[5]
    assert stop not in free[:5]
    cut = llm.generate(
        [PROMPTS[2]], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], ignore_eos=True)
    )[0].outputs[0]
    assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == (free[:6], "stop", stop)
    held = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], min_tokens=9, ignore_eos=True)
    output = llm.generate([PROMPTS[2]], held)[0].outputs[0]
    assert stop not in output.token_ids[:9]
    assert output.token_ids[:5] == free[:5]
    assert len(output.token_ids) >= 9


def test_logit_bias_forces_and_forbids(llm):
    free = alone(llm, PROMPTS[2], GREEDY)
    forced = llm.generate(
        [PROMPTS[2]], SamplingParams(temperature=0, max_tokens=4, logit_bias={9: 100.0}, ignore_eos=True)
    )
    assert tokens(forced)[0] == (9, 9, 9, 9)
    without = llm.generate(
        [PROMPTS[2]], SamplingParams(temperature=0, max_tokens=8, logit_bias={free[0]: -100.0}, ignore_eos=True)
    )
    assert free[0] not in tokens(without)[0]


def test_penalties_count_what_was_generated_even_after_preemption(llm, crowded_llm):
    params = SamplingParams(
        temperature=0, max_tokens=20, frequency_penalty=2.0, repetition_penalty=1.3, ignore_eos=True
    )
    expected = [alone(llm, p, params) for p in PROMPTS]
    assert expected != [alone(llm, p, GREEDY) for p in PROMPTS]
    crowded_llm.engine.scheduler.blocks.reset_prefix_cache()
    assert tokens(crowded_llm.generate(PROMPTS, params, use_tqdm=False)) == expected


def test_logprobs_are_the_models_own(llm, plain_logits):
    prompt = PROMPTS[4][:60]
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=4, prompt_logprobs=2, ignore_eos=True)
    for _ in range(2):  # the second time most of the prompt is cached, and must be scored all the same
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        sample = output.outputs[0]
        exact = np.asarray(jax.nn.log_softmax(plain_logits([*prompt, *sample.token_ids])))
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
        assert (
            abs(
                sample.cumulative_logprob
                - sum(e[t].logprob for e, t in zip(sample.logprobs, sample.token_ids, strict=True))
            )
            < 1e-6
        )


def test_prompt_shapes_are_told_apart(llm):
    assert len(llm.generate("abc", GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate(["abc", [5, 6]], GREEDY, use_tqdm=False)) == 2
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    named = llm.generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt": "abc"}], GREEDY, use_tqdm=False)
    assert tokens(named) == [alone(llm, [5, 6, 7], GREEDY), alone(llm, "abc", GREEDY)]
    with pytest.raises(InvalidParameterError, match="prompt_token_ids"):
        llm.generate({"text": "abc"}, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidParameterError, match="sampling_params"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)


@pytest.mark.parametrize("prompts", [None, 5])
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(InvalidParameterError, match="prompts: expected texts or lists of token ids"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [None]])
def test_what_is_no_sampling_params_is_refused(llm, params):
    with pytest.raises(InvalidParameterError, match="sampling_params: expected SamplingParams"):
        llm.generate([[5, 6]], params)


def test_an_unfinished_stream_does_not_disturb_the_end_of_the_program(tiny_folder):
    program = f"""
from verax import LLM
llm = LLM({str(tiny_folder)!r}, max_num_seqs=1, max_model_len=64, use_tqdm=False)
pieces = llm.stream("abc")
next(pieces)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def finish(llm):
    """Outputs of the requests that were added, in the order of their ends."""
    ended = []
    while llm.has_unfinished_requests:
        ended += [output for output in llm.step() if output.finished]
        llm.engine.check()
    return ended


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        RANDOM,
        SamplingParams(temperature=0, max_tokens=20, frequency_penalty=2.0, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(n=2, temperature=1.3, seed=6, max_tokens=20, stop=["a", "or"], min_tokens=5),
    ],
    ids=["greedy", "sampled", "penalties", "stop strings"],
)
def test_a_request_goes_on_behind_its_answer_so_far(llm, params):
    (expected,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
    answers = [sample.token_ids for sample in expected.outputs]
    for cut in range(max(map(len, answers)) + 1):
        llm.add_request(PROMPTS[2], params, output_token_ids=[answer[:cut] for answer in answers])
        (output,) = finish(llm)
        assert output.outputs == expected.outputs
        assert output.num_cached_tokens <= len(PROMPTS[2])


def test_answers_so_far_survive_preemption(llm, crowded_llm):
    expected = [alone(llm, p, RANDOM) for p in PROMPTS]
    crowded_llm.engine.scheduler.blocks.reset_prefix_cache()
    before = preemptions(crowded_llm)
    names = [
        crowded_llm.add_request(p, RANDOM, output_token_ids=[answer[:7]])
        for p, answer in zip(PROMPTS, expected, strict=True)
    ]
    done = {output.request_id: output for output in finish(crowded_llm)}
    assert tokens(done[name] for name in names) == expected
    assert preemptions(crowded_llm) > before


def test_log_probabilities_are_those_of_the_new_tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=1, ignore_eos=True)
    (expected,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
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
    ],
)
def test_an_impossible_answer_so_far_is_refused_and_leaves_nothing(llm, answers, error, message):
    with pytest.raises(error, match=message):
        llm.add_request(PROMPTS[2], GREEDY, output_token_ids=answers)
    assert not llm.has_unfinished_requests
    llm.engine.check()


def test_a_stop_token_that_is_kept_is_streamed_too(llm):
    params = SamplingParams(
        temperature=1.4, seed=8, max_tokens=60, stop_token_ids=list(range(60, 110)), include_stop_str_in_output=True
    )
    (expected,) = llm.generate(["once upon"], params, use_tqdm=False)
    assert expected.outputs[0].finish_reason == "stop"
    assert "".join(llm.stream("once upon", params)) == expected.outputs[0].text != ""


@pytest.mark.parametrize("num_pieces", [0, 1])
def test_a_stream_that_is_dropped_leaves_nothing_in_the_engine(llm, num_pieces):
    expected = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].outputs
    pieces = llm.stream(PROMPTS[1], GREEDY)
    for _ in range(num_pieces):
        assert next(pieces)
    del pieces
    assert not llm.has_unfinished_requests
    assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].outputs == expected
    llm.engine.check()


def test_a_stream_that_is_closed_after_one_piece_leaves_the_other_requests(llm):
    expected = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].outputs
    pieces, other = llm.stream(PROMPTS[1], GREEDY), llm.add_request(PROMPTS[2], GREEDY)
    next(pieces)
    pieces.close()
    done = {}
    while llm.has_unfinished_requests:
        done |= {output.request_id: output.outputs for output in llm.step() if output.finished}
    assert done == {other: expected}
