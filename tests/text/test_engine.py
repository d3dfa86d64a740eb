"""Engines of tiny random models: the same tokens whatever happens around a request."""

import json
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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
from tests.support.tiny import tiny_checkpoint
from tests.text.conftest import make_llm
from verax import ops
from verax.errors import InvalidParameterError, RequestRefusedError, VeraxError
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step.program import new_cache, new_kept_states
from verax.text.step.sizes import block_bytes, plan_sizes, state_bytes

PENALTIES = SamplingParams(temperature=0, max_tokens=20, frequency_penalty=2.0, repetition_penalty=1.3, ignore_eos=True)
SAMPLING = pytest.mark.parametrize("params", [GREEDY, RANDOM, PENALTIES], ids=["greedy", "sampled", "penalties"])

MODELS = {
    "llm": ("tiny_folder", (32,)),
    "windowed_llm": ("windowed_folder", (26, 13)),
    "hybrid_llm": ("hybrid_folder", (32,)),
}
"""Folder of each engine's model, and numbers of blocks with which a few long sequences preempt each other."""


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """An engine of each model, and its few blocks."""
    return request.getfixturevalue(request.param), MODELS[request.param][1]


def test_greedy_tokens_equal_the_model_without_an_engine(model):
    # The budget is 32 tokens: prompts of 33 to 64 are computed in two or three chunks.
    llm, scores = model[0], plain_scores(model[0])
    assert [alone(llm, prompt) for prompt in PROMPTS] == [greedy_answer(scores, prompt) for prompt in PROMPTS]


def test_numbers_that_are_not_finite_end_their_own_request_with_an_error(tmp_path):
    folder = tiny_checkpoint(tmp_path / "damaged", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = np.nan
    save_file(weights, folder / "model.safetensors")
    llm = make_llm(folder, structured_outputs=True)
    form = SamplingParams(structured_outputs={"choice": ["once", "a"]}, logprobs=1)
    for params in (GREEDY, form):
        good, damaged = generate(llm, [[3, 4, 5], [3, 7, 5]], [params, replace(params, n=2)])
        assert (good.error, good.outputs[0].finish_reason == "error") == (None, False)
        assert "not finite" in damaged.error
        assert [(sample.finish_reason, sample.token_ids) for sample in damaged.outputs] == [("error", ())] * 2
    assert alone(llm, [3, 4, 5])
    with pytest.raises(VeraxError, match="not finite"):
        list(llm.stream([3, 7, 5], GREEDY))
    check_engine(llm.engine)


@SAMPLING
def test_neither_a_crowd_nor_preemption_nor_others_that_run_change_a_token(model, params):
    llm, blocks = model
    expected = [alone(llm, prompt, params) for prompt in PROMPTS]
    assert tokens(generate(llm, PROMPTS, params)) == add_slowly(llm, PROMPTS, params) == expected
    assert llm.engine.scheduler.blocks.usage == 0
    with few_blocks(llm, *blocks) as scheduler:
        assert tokens(generate(llm, PROMPTS, params)) == expected
    assert scheduler.num_preemptions > 0


def test_an_interrupt_ends_a_call_after_its_step_and_the_engine_continues(model, monkeypatch):
    llm, _ = model
    expected = tokens(generate(llm, PROMPTS))

    def interrupted(step):
        def call(*arguments):
            result = step(*arguments)
            signal.raise_signal(signal.SIGINT)  # the slots and the cache among the arguments are gone
            return result

        return call

    runner = llm.engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_steps", {shape: interrupted(step) for shape, step in runner._steps.items()})
        with pytest.raises(KeyboardInterrupt):
            generate(llm, PROMPTS)
    assert not llm.has_unfinished_requests
    check_engine(llm.engine)
    assert tokens(generate(llm, PROMPTS)) == expected


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


def test_only_the_prompt_of_a_scored_request_takes_mixed_steps(llm, monkeypatch):
    shapes, dispatch = [], llm.engine.runner._dispatch
    monkeypatch.setattr(llm.engine.runner, "_dispatch", lambda *step: shapes.append(step[0]) or dispatch(*step))
    monkeypatch.setattr(llm.engine.scheduler, "decode_steps", {})  # a token in each step
    (scored,) = generate(llm, PROMPTS[3:4], replace(GREEDY, prompt_logprobs=1))
    assert [shape.decode for shape in shapes] == [False] * 2 + [True] * 19
    assert scored.outputs[0].token_ids == alone(llm, PROMPTS[3])


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


def test_64_bit_numbers_elsewhere_in_a_program_change_nothing(llm, tiny_folder):
    expected = tokens(generate(llm, PROMPTS[:4]))
    jax.config.update("jax_enable_x64", True)
    try:
        assert tokens(generate(make_llm(tiny_folder), PROMPTS[:4])) == expected
    finally:
        jax.config.update("jax_enable_x64", False)


def test_suppressed_tokens_are_never_drawn(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "suppressed")
    params = [GREEDY, replace(PENALTIES, logit_bias={1: 5.0}), replace(RANDOM, temperature=2.0, n=4)]
    prompts = [PROMPTS[0]] * len(params)
    free = make_llm(folder, max_num_seqs=8).generate(prompts, params)
    drawn = sorted({token for output in free for answer in output.outputs for token in answer.token_ids})
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [-1, *drawn, 1 << 20]}))
    llm = make_llm(folder, max_num_seqs=8)
    for output in llm.generate(prompts, params):
        for answer in output.outputs:
            assert len(answer.token_ids) == len(free[0].outputs[0].token_ids)
            assert not set(answer.token_ids) & set(drawn)
    with pytest.raises(RequestRefusedError, match="logit_bias: expected at most 300"):
        llm.generate(PROMPTS[0], SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0)))


def test_seeds_have_64_bits_and_top_p_of_0_is_greedy(llm):
    def drawn(**params):
        return alone(llm, PROMPTS[2], SamplingParams(max_tokens=12, ignore_eos=True, **params))

    assert len({drawn(temperature=1.5, seed=5 + offset) for offset in (0, 2**31, 2**32, 2**62)}) == 4
    assert drawn(temperature=1.5, top_p=0, seed=5) == drawn(temperature=0)


def test_unseeded_requests_repeat_with_the_engine_seed_and_not_within_it(tiny_folder):
    params = SamplingParams(temperature=1.5, max_tokens=10, ignore_eos=True)
    a, b = (tokens(generate(make_llm(tiny_folder, seed=11), [PROMPTS[1]] * 2, params)) for _ in range(2))
    assert a == b
    assert a[0] != a[1]


def test_aborted_requests_leave_the_others_alone(llm):
    expected = [alone(llm, prompt) for prompt in PROMPTS[:3]]
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    for _ in range(4):
        llm.step()
    cut = llm.abort(ids[1]).outputs[0]
    assert cut.finish_reason == "abort"
    assert cut.token_ids == expected[1][: len(cut.token_ids)]
    ended = {output.request_id: output.outputs[0].token_ids for output in finish(llm)}
    assert ended == {ids[0]: expected[0], ids[2]: expected[2]}
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
    ending |= dict(min_tokens=2**31 - 1, max_tokens=None)
    assert len(alone(llm, PROMPTS[2], SamplingParams(**ending))) == 96 - len(PROMPTS[2])


def test_prompts_of_each_shape_are_recognised(llm):
    assert len(llm.generate("abc", GREEDY)) == 1
    for one in ([5, 6, 7], np.asarray([5, 6, 7]), jnp.asarray([5, 6, 7])):
        assert tokens(llm.generate(one, GREEDY)) == [alone(llm, [5, 6, 7], GREEDY)]
    assert len(llm.generate(["abc", [5, 6]], GREEDY)) == 2
    assert llm.generate([], GREEDY) == []
    named = llm.generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt": "abc"}], GREEDY)
    assert tokens(named) == [alone(llm, [5, 6, 7], GREEDY), alone(llm, "abc", GREEDY)]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        *((wrong, None, "prompts: expected texts or lists of token ids") for wrong in (None, 5, b"abc")),
        ({"text": "abc"}, None, "prompts: text: .*prompt_token_ids"),
        ({"prompt": "abc", "multi_modal_data": {"image": 0}}, None, "prompts: multi_modal_data: no such field"),
        ([{"prompt_token_ids": [5, 6], "cache_salt": "me"}], None, "prompts: cache_salt: no such field"),
        ({"prompt": None}, None, "prompts: .*got neither"),
        (["a", "b"], [GREEDY], "sampling_params: 1 given for 2"),
        *(([[5, wrong]], GREEDY, "prompt: expected token ids") for wrong in (1.5, "6", None, float("nan"), [6], True)),
        ([b"abc"], GREEDY, "prompt: expected a text, token ids or messages"),
        (["a\ud800b"], GREEDY, "prompt: .*half of a character"),
        *(([[5, 6]], wrong, "sampling_params: expected SamplingParams") for wrong in ({"seed": 0}, "greedy", [None])),
    ],
)
def test_what_is_not_a_prompt_or_parameters_is_refused(llm, prompts, params, message):
    with pytest.raises((InvalidParameterError, RequestRefusedError), match=message):
        llm.generate(prompts, params)


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


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (lambda llm: llm.chat([{"role": "user", "content": "abc"}], temperature=0), "temperature: give it in"),
        (lambda llm: llm.stream([{"role": "user", "content": "abc"}], max_tokens=3), "max_tokens: give it in"),
        (lambda llm: llm.stream("abc", enable_thinking=False), "enable_thinking: a prompt has no chat template"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template="{{ 1 }}"), "chat_template: it is not"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs={}), "chat_template_kwargs: it"),
    ],
)
def test_an_argument_that_no_template_reads_is_refused(llm, answer, named):
    with pytest.raises(InvalidParameterError, match=named):
        answer(llm)


@pytest.mark.parametrize("num_pieces", [0, 1])
def test_a_stream_that_is_dropped_leaves_the_other_requests_and_nothing_else(llm, num_pieces):
    expected = llm.generate(PROMPTS[2], GREEDY)[0].outputs
    pieces, other = llm.stream(PROMPTS[1], GREEDY), llm.add_request(PROMPTS[2], GREEDY)
    for _ in range(num_pieces):
        assert next(pieces)
    del pieces
    assert {output.request_id: output.outputs for output in finish(llm)} == {other: expected}
    assert not llm.has_unfinished_requests


def test_a_stream_that_is_closed_within_a_step_leaves_the_other_requests(llm, monkeypatch):
    """The garbage collector may close it there, if it was part of a cycle such as an error's traceback."""
    expected, blocks = alone(llm, PROMPTS[3]), llm.engine.scheduler.blocks
    grow = blocks.grow
    pieces = llm.stream(PROMPTS[1], GREEDY)
    assert next(pieces)

    def grow_and_collect(*arguments, **options):
        pieces.close()
        return grow(*arguments, **options)

    monkeypatch.setattr(blocks, "grow", grow_and_collect)
    assert alone(llm, PROMPTS[3]) == expected
    assert not llm.has_unfinished_requests
    check_engine(llm.engine)


@pytest.mark.parametrize("messages", ["Hello", {"role": "user", "content": "Hello"}, iter([])])
def test_a_chat_that_is_not_a_list_is_refused_by_name(llm, messages):
    with pytest.raises(InvalidParameterError, match="messages: expected a list"):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize("tools", [[len], "f", {"type": "function"}, [{"type": "function", "function": {"name": "f"}}]])
def test_functions_that_no_template_could_read_or_this_one_leaves_out_are_refused(llm, tools):
    hello = [{"role": "user", "content": "Hello"}]
    with pytest.raises(InvalidParameterError, match="tools"):
        llm.chat(hello, GREEDY, tools=tools)
    with pytest.raises(InvalidParameterError, match="tools"):
        llm.stream(hello, GREEDY, tools=tools)
    assert llm.chat(hello, GREEDY, tools=[])[0].prompt == llm.render(hello)


def test_sampling_parameters_of_a_stream_are_a_record(llm):
    with pytest.raises(InvalidParameterError, match="sampling_params: expected SamplingParams"):
        llm.stream("Hello", {"temperature": 0})


def test_threads_that_share_a_model_get_the_answers_to_their_own_prompts(llm):
    def streamed(prompt):
        pieces = llm.stream(prompt, GREEDY)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return end.value.outputs[0].token_ids

    expected = [alone(llm, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(streamed, prompt) if i % 2 else pool.submit(alone, llm, prompt)
            for i, prompt in enumerate(PROMPTS)
        ]
        assert [call.result() for call in calls] == expected
    check_engine(llm.engine)


def test_a_stream_is_whole_when_steps_of_others_finish_it(llm):
    expected = llm.generate("abc", GREEDY)[0].outputs
    pieces = llm.stream("abc", GREEDY)
    shown = [next(pieces)]
    assert finish(llm)[0].outputs == expected

    def rest():
        output = yield from pieces
        assert output.outputs == expected

    assert "".join([*shown, *rest()]) == expected[0].text


def test_a_stream_of_an_engine_that_fell_asleep_is_refused(llm):
    pieces = llm.stream(PROMPTS[1], GREEDY)
    llm.sleep()
    with pytest.raises(InvalidParameterError, match="the engine sleeps"):
        next(pieces)
    llm.wake_up()
    assert not llm.has_unfinished_requests


@pytest.fixture(scope="module")
def hybrid_answers(hybrid_llm):
    """The greedy answers of the model by itself."""
    scores = plain_scores(hybrid_llm)
    return [greedy_answer(scores, prompt) for prompt in PROMPTS]


def poison(hybrid_llm):
    """NaN in every slot's state: whoever reads what another sequence left shows it in every later token."""
    runner = hybrid_llm.engine.runner
    runner._cache = tuple(
        layer if type(layer) is tuple else jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), layer)
        for layer in runner._cache
    )


@pytest.mark.parametrize("budget", [8, 13])
def test_every_way_of_cutting_a_prompt_gives_the_same_tokens(hybrid_llm, hybrid_answers, monkeypatch, budget):
    monkeypatch.setattr(hybrid_llm.engine.scheduler, "max_num_batched_tokens", budget)
    assert [alone(hybrid_llm, p) for p in PROMPTS] == hybrid_answers
    assert tokens(generate(hybrid_llm, PROMPTS)) == hybrid_answers


def test_a_new_sequence_never_sees_what_its_slot_held(hybrid_llm, hybrid_answers):
    for prompt, answer in zip(PROMPTS[:4], hybrid_answers, strict=False):  # one token of prompt is a decode step
        poison(hybrid_llm)
        assert alone(hybrid_llm, prompt) == answer
    poison(hybrid_llm)
    assert tokens(generate(hybrid_llm, PROMPTS)) == hybrid_answers  # ten requests, eight slots


@pytest.fixture(scope="module")
def keeping_llm(hybrid_folder):
    """A hybrid model that keeps the states of short prefixes too, of three at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verax.text.step.sizes.MOST_KEPT", 3)
        yield make_llm(hybrid_folder)


@pytest.fixture(autouse=True)
def _keep_short_prefixes(monkeypatch):
    monkeypatch.setattr("verax.text.engine.blocks.LEAST_KEPT", 8)


SCORED = replace(GREEDY, logprobs=2)
LONG = np.random.default_rng(7).integers(3, 200, 41).tolist()


def answer(llm, prompt, params=SCORED):
    """Tokens, their log-probabilities and the number of cached tokens, after every slot's state is lost."""
    poison(llm)
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.num_cached_tokens


@pytest.mark.parametrize("params", [SCORED, replace(SCORED, temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_a_kept_state_gives_the_same_bits(keeping_llm, params):
    keeping_llm.engine.scheduler.blocks.reset_prefix_cache()
    first, second = (answer(keeping_llm, LONG, params) for _ in range(2))
    assert (first[2], second[2]) == (0, 40)
    assert second[:2] == first[:2]
    if params.temperature == 0:
        assert first[0] == greedy_answer(plain_scores(keeping_llm), LONG)


def test_states_are_kept_where_texts_part_and_the_least_recently_used_ones_go(keeping_llm):
    blocks = keeping_llm.engine.scheduler.blocks
    blocks.reset_prefix_cache()
    prompts = [[*LONG[:22], 5 + i, *LONG[22:30]] for i in range(4)]
    scores = plain_scores(keeping_llm)
    cached = []
    for prompt in prompts:
        tokens, _, hits = answer(keeping_llm, prompt)
        assert tokens == greedy_answer(scores, prompt)
        cached.append(hits)
    assert cached == [0, 0, 20, 20]  # the second one leaves the state at which it parts from the first
    # Three rows: the shared prefix, which was used last but one, and the ends of the last two prompts.
    assert [answer(keeping_llm, prompts[i])[2] for i in (3, 2, 0)] == [28, 28, 20]
    assert len(blocks._prefixes) < 40
    blocks.reset_prefix_cache()
    assert len(blocks._prefixes) == 0
    assert answer(keeping_llm, prompts[3])[2] == 0


def test_alike_prompts_of_one_step_and_long_ones_that_preempt_each_other_keep_their_answers(keeping_llm):
    scores = plain_scores(keeping_llm)
    prompts = [LONG[:12], LONG[:12], LONG[:13], LONG, LONG, [*LONG[:20], 9], LONG[:9], [*LONG, *LONG[:30]], [*LONG, 4]]
    expected = [greedy_answer(scores, prompt) for prompt in prompts]
    with few_blocks(keeping_llm, 32) as scheduler:
        for _ in range(2):
            poison(keeping_llm)
            assert tokens(generate(keeping_llm, prompts)) == expected
        assert scheduler.num_preemptions > 0
        assert scheduler.blocks.num_hits > 0
        ids = [keeping_llm.add_request(prompt, GREEDY) for prompt in prompts]
        for _ in range(3):
            keeping_llm.step()
        for request_id in ids[::2]:
            keeping_llm.abort(request_id)
        ended = sorted(finish(keeping_llm), key=lambda output: ids.index(output.request_id))
        assert tokens(ended) == expected[1::2]


def test_a_cache_without_room_for_a_kept_state_is_refused_where_it_is_asked_for(hybrid_llm):
    config = hybrid_llm.engine.runner.abstract_model.config
    options = EngineConfig(kv_cache_memory=7 * state_bytes(config), max_num_seqs=1, max_model_len=8)
    assert plan_sizes(config, np.float32, options).num_kept_states == 0
    with pytest.raises(InvalidParameterError, match=r"enable_prefix_caching: an eighth .* more kv_cache_memory"):
        plan_sizes(config, np.float32, replace(options, enable_prefix_caching=True))


def test_states_are_part_of_the_memory_plan(hybrid_llm):
    config = hybrid_llm.model_config
    one = 4 * (4 * 12 * 20 + 3 * (2 * 2 * 12 + 4 * 20)) * 2  # two delta layers, float32: memory and inputs
    assert state_bytes(config) == one
    plan = plan_sizes(config, "float32", EngineConfig(block_size=4, kv_cache_memory=20 * one))
    assert (plan.max_num_seqs, plan.num_kept_states) == (10, 2)  # half of the memory, and an eighth
    arrays = new_cache(config, plan), new_kept_states(config, plan)
    held = sum(array.nbytes for array in jax.tree.leaves(arrays))
    assert 20 * one - block_bytes(config, 4, "float32") < held <= 20 * one
    two = EngineConfig(block_size=4, kv_cache_memory=20 * one, tensor_parallel_size=2)
    assert plan_sizes(config.on_devices(2), "float32", two).max_num_seqs == 20  # each device has half of a state
    assert state_bytes(config.on_devices(3), 3) == one  # two key heads, which three devices cannot divide
    with pytest.raises(InvalidParameterError, match="in addition to 22 recurrent states"):
        plan_sizes(config, "float32", EngineConfig(max_num_seqs=20, block_size=4, kv_cache_memory=20 * one))


def test_a_prefix_is_used_only_where_its_last_window_is_cached(windowed_llm):
    text = np.random.default_rng(1).integers(3, 200, 70).tolist()
    answer = [greedy_answer(plain_scores(windowed_llm), text)]
    short = SamplingParams(temperature=0, max_tokens=4)
    beginnings = [text[:length] for length in (65, 41, 21)]
    alone = [tokens(generate(windowed_llm, [beginning], short)) for beginning in beginnings]
    # 14 blocks for windows: the text itself takes the blocks of its beginning again.
    with few_blocks(windowed_llm, 100, 15):
        assert tokens(generate(windowed_llm, [text])) == answer
        outputs = [generate(windowed_llm, [beginning], short) for beginning in beginnings]
        # The blocks of tokens 0 to 19 and 36 to 51 are taken; the blocks of 20 to 35 hold the last window of 32 tokens.
        assert [output[0].num_cached_tokens for output in outputs] == [64, 32, 0]
        assert [tokens(output) for output in outputs] == alone
        assert tokens(generate(windowed_llm, [text])) == answer


def test_a_model_that_attends_to_another_window_than_it_declares_is_refused(windowed_llm, monkeypatch):
    runner = windowed_llm.engine.runner
    config = type(runner.abstract_model.config)
    monkeypatch.setattr(config, "sliding_windows", property(lambda self: (None, None, None)))
    with pytest.raises(InvalidParameterError, match=r"layer 0 attends to a window of None, but .* has 10"):
        runner.program(runner.config.shapes[0]).lower()


# Steps that decode several tokens of each sequence.


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """An engine of each model, one whose steps decode three tokens of each sequence, and their few blocks."""
    folder, blocks = MODELS[request.param]
    several = make_llm(request.getfixturevalue(folder), num_scheduler_steps=3)
    return request.getfixturevalue(request.param), several, blocks


def counted_steps(llm):
    """Number of dispatched steps by the tokens that they decode of a sequence."""
    counts, dispatch = Counter(), llm.engine.runner._dispatch

    def count(shape, packed):
        counts[shape.decode_steps if shape.decode else 0] += 1
        return dispatch(shape, packed)

    llm.engine.runner._dispatch = count
    return counts


@SAMPLING
def test_the_tokens_are_those_of_single_steps(pair, params):
    single, several, _ = pair
    expected = tokens(generate(single, PROMPTS, params))
    with nothing_compiles(several):
        assert tokens(generate(several, PROMPTS, params)) == expected
        assert add_slowly(several, PROMPTS, params) == expected
    assert several.engine.scheduler.blocks.usage == 0


def test_nobody_is_preempted_for_tokens_that_can_wait(pair):
    single, several, blocks = pair
    with few_blocks(several, *blocks) as scheduler:
        assert tokens(generate(several, PROMPTS)) == tokens(generate(single, PROMPTS))
    several_preemptions = scheduler.num_preemptions
    with few_blocks(single, *blocks) as scheduler:
        generate(single, PROMPTS)
    assert several_preemptions <= scheduler.num_preemptions + 1


def test_an_answer_ends_within_a_step(llm, tiny_folder):
    several = make_llm(tiny_folder, num_scheduler_steps=4)
    (answer,) = tokens(generate(llm, PROMPTS[1:2], GREEDY))
    for place in range(2, 10):
        stop = replace(GREEDY, stop_token_ids=[answer[place]])
        expected = answer[: answer.index(answer[place]) + 1]
        (output,) = generate(several, PROMPTS[1:2], stop)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].finish_reason == "stop"
    for most in range(1, 9):
        (output,) = generate(several, PROMPTS[1:2], replace(GREEDY, max_tokens=most))
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (answer[:most], "length")
    whole = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    assert tokens(generate(several, PROMPTS[4:5], whole)) == tokens(generate(llm, PROMPTS[4:5], whole))


def test_steps_decode_one_token_where_the_host_is_needed_between_two(tiny_folder):
    several = make_llm(tiny_folder, num_scheduler_steps=4)
    counts = counted_steps(several)
    generate(several, PROMPTS[:2], replace(GREEDY, max_tokens=9))
    assert (counts[1], counts[4]) == (0, 2)
    generate(several, PROMPTS[7:9], [replace(GREEDY, max_tokens=9, logprobs=2), replace(GREEDY, max_tokens=9)])
    assert (counts[1], counts[4]) == (8, 2)


def test_a_small_budget_of_tokens_and_grammars_leave_the_tokens_unchanged(llm, tiny_folder):
    # Steps of 8 sequences decode 64 tokens; the sampling of grammars has programs for as many rows as some of them.
    several = make_llm(tiny_folder, num_scheduler_steps=8, max_num_batched_tokens=8, structured_outputs=True)
    assert tokens(generate(several, PROMPTS)) == tokens(generate(llm, PROMPTS))


def test_a_step_that_reads_few_weights_decodes_several_tokens(llm):
    config, given = llm.engine.runner.abstract_model.config, EngineConfig(kv_cache_memory=1 << 24, max_num_seqs=256)

    def steps(platform, weights, config=config, given=given):
        with ops.use_target(platform, "NVIDIA H100 80GB HBM3" if platform == "gpu" else "cpu"):
            sizes = plan_sizes(config, "float32", given, weights=weights)
        return {shape.rows: shape.decode_steps for shape in sizes.repeated}

    assert steps("gpu", 1_200_000_000) == {1: 8, 4: 8, 16: 8, 64: 8, 256: 4}
    assert steps("gpu", 3_400_000_000) == {1: 2, 4: 2, 16: 2, 64: 2, 256: 2}
    assert steps("gpu", 16_000_000_000) == steps("cpu", 1_200_000_000) == {}
    assert steps("cpu", 100_000_000) == {1: 4, 4: 4}
    assert steps("cpu", 400_000_000) == {1: 2, 4: 2}
    assert steps("cpu", 1, given=replace(given, num_scheduler_steps=2))[256] == 2


def test_drafts_and_several_steps_are_refused_together(tiny_folder):
    with pytest.raises(InvalidParameterError, match=r"num_scheduler_steps: .*drafts"):
        make_llm(
            tiny_folder, num_scheduler_steps=2, speculative_config={"method": "ngram", "num_speculative_tokens": 2}
        )
