"""Speculative decoding: its options, the number of drafts, and answers of every drafter as without drafts."""

import dataclasses
import random

import numpy as np
import pytest

from tests.support.engine import finish, nothing_compiles, tokens
from tests.support.invariants import check_engine
from tests.text.speculative.conftest import (
    GREEDY,
    LOOPING,
    PROMPTS,
    REPEATED,
    SAMPLING,
    assert_unchanged,
    expected,
    free_drafts,
    outputs,
    samples,
    totals,
    without_drafts,
)
from verax.errors import InvalidParameterError
from verax.text.engine.async_llm import AsyncLLM
from verax.text.engine.engine_config import EngineConfig, SpeculativeConfig
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.speculative import Policy, StepCost

SLOW = pytest.mark.slow
FREE, REPEATING = (
    ("greedy", "seed", "truncated", "penalties", "several"),
    ("greedy", "seed", "min tokens", "stop token"),
)


@pytest.fixture(params=["ngram", "mtp", *(pytest.param(name, marks=SLOW) for name in ("hybrid", "draft_model"))])
def drafted(request, monkeypatch):
    """An engine with drafts of each kind."""
    llm = request.getfixturevalue(request.param)
    if request.param in ("mtp", "draft_model"):
        free_drafts(llm, monkeypatch)
    return llm


@pytest.mark.parametrize(("kind", "biased"), [*((kind, False) for kind in FREE), *((kind, True) for kind in REPEATING)])
def test_answers_equal_an_engine_without_drafts(drafted, kind, biased):
    common = LOOPING if biased else {"max_tokens": 30, "ignore_eos": True}
    params = SamplingParams(**{**common, **SAMPLING[kind]})
    counts = [assert_unchanged(drafted, prompts, params) for prompts in (PROMPTS, PROMPTS[3:4])]
    if biased and kind in ("greedy", "seed"):
        assert sum(accepted for _, accepted in counts) > 10


def test_logprobs_equal_an_engine_without_drafts(ngram):
    params = SamplingParams(**LOOPING, logprobs=3, prompt_logprobs=2)
    before = totals(ngram)
    with without_drafts(ngram):
        alone = outputs(ngram, PROMPTS, params)
    for ours, theirs in zip(outputs(ngram, PROMPTS, params), alone, strict=True):
        (a,), (b,) = ours.outputs, theirs.outputs
        assert a.token_ids == b.token_ids
        assert [list(entry) for entry in a.logprobs] == [list(entry) for entry in b.logprobs]
        scores = ([[one.logprob for one in entry.values()] for entry in sample.logprobs] for sample in (a, b))
        np.testing.assert_allclose(*scores, atol=2e-4)
        np.testing.assert_allclose(a.cumulative_logprob, b.cumulative_logprob, atol=2e-3)
        assert [e and list(e) for e in ours.prompt_logprobs] == [e and list(e) for e in theirs.prompt_logprobs]
    assert totals(ngram) > before


def test_stop_strings_end_an_answer_within_its_drafts(ngram):
    text = expected(ngram, [REPEATED[0]], SamplingParams(**LOOPING))[0][0][1]
    for stop in (text[5:7], text[11:14]):
        assert_unchanged(ngram, REPEATED, SamplingParams(**LOOPING, stop=stop))


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 19, None])
def test_an_answer_ends_at_max_tokens_or_fills_the_context(ngram, max_tokens):
    params = SamplingParams(**{**LOOPING, "max_tokens": max_tokens})
    made = samples(ngram, REPEATED, params)
    assert made == expected(ngram, REPEATED, params)
    lengths = [len(sample[0]) for (sample,) in made]
    assert lengths == [96 - len(prompt) if max_tokens is None else max_tokens for prompt in REPEATED]


FORMS = {
    "regex": {"regex": "(ab|ba){1,20}c"},
    "choice": {"choice": ["abababababab", "abababac"]},
    "json": {"json": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 12}},
    "after": {"regex": "[ab]{8}", "after": "b"},
}


@pytest.mark.parametrize(
    ("drafted", "form", "temperature"),
    [
        *(("ngram", form, temperature) for form in FORMS for temperature in (0, 1.2)),
        ("mtp", "regex", 0),
        pytest.param("hybrid", "regex", 0, marks=SLOW),
    ],
    indirect=["drafted"],
)
def test_forms_hold_within_drafts(drafted, form, temperature):
    repeating = [drafted.tokenizer.encode("abababababab ab ab [1,1,1,1,1,1"), *REPEATED[:2]]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, structured_outputs=FORMS[form])
    before, free = totals(drafted), SamplingParams(**LOOPING)
    assert_unchanged(drafted, [*repeating, REPEATED[2]], [params, params, params, free])
    assert_unchanged(drafted, repeating[:1], params)
    assert totals(drafted) > before


def test_preemption_changes_no_token(drafted):
    assert_unchanged(drafted, PROMPTS, GREEDY, blocks=32)
    _, accepted = assert_unchanged(drafted, PROMPTS, SamplingParams(**LOOPING, logprobs=2), blocks=32)
    assert accepted > 0


@pytest.mark.parametrize("drafted", ["ngram", "mtp"], indirect=True)
def test_a_prefix_hit_and_an_answer_so_far_change_no_token(drafted):
    params = SamplingParams(**LOOPING)
    (alone,) = expected(drafted, [REPEATED[2]], params)
    answer = alone[0][0]
    for _ in range(2):
        assert samples(drafted, [REPEATED[2]], params) == [alone]
    (again,) = outputs(drafted, [[*REPEATED[2], *answer[:20]]], dataclasses.replace(params, max_tokens=10))
    assert again.num_cached_tokens > 40
    assert again.outputs[0].token_ids == answer[20:]
    for cut in (1, 7, 29):
        drafted.add_request(REPEATED[2], params, output_token_ids=[answer[:cut]])
        assert tokens(finish(drafted)) == [answer]


async def test_streams_are_the_answers_and_the_engine_thread_counts_drafts(ngram):
    params = SamplingParams(**LOOPING, logprobs=1)
    alone = expected(ngram, REPEATED, params)
    assert "".join(ngram.stream({"prompt_token_ids": REPEATED[0]}, params)) == alone[0][0][1]
    async with AsyncLLM.from_llm(ngram) as served:
        for prompt, ((token_ids, text, *_),) in zip(REPEATED, alone, strict=True):
            parts = [output.outputs[0] async for output in served.generate(prompt, params)]
            assert sum((part.token_ids for part in parts), ()) == token_ids
            assert "".join(part.text for part in parts) == text
            assert sum(len(part.logprobs) for part in parts) == len(token_ids)
        stats = served.stats().spec_decode
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens


@pytest.mark.parametrize("seed", range(2))
def test_random_schedules_change_no_answer(ngram, seed):
    random_of = random.Random(seed)
    kinds = [SamplingParams(**LOOPING), GREEDY, SamplingParams(temperature=1.0, seed=9, max_tokens=17, ignore_eos=True)]
    wanted = [(random_of.choice(PROMPTS), random_of.choice(kinds)) for _ in range(12)]
    alone = [expected(ngram, [prompt], params)[0][0][0] for prompt, params in wanted]
    waiting, ids, done = list(range(len(wanted))), {}, {}
    while waiting or ngram.has_unfinished_requests:
        while waiting and random_of.random() < 0.4:
            number = waiting.pop()
            ids[ngram.add_request(*wanted[number])] = number
        for output in ngram.step():
            if output.finished:
                done[ids[output.request_id]] = output.outputs[0].token_ids
        if random_of.random() < 0.05 and (running := ngram.engine.scheduler.running):
            name = random_of.choice(running).request.request_id
            cut = ngram.abort(name).outputs[0].token_ids
            assert cut == alone[ids[name]][: len(cut)]
            done[ids[name]] = alone[ids[name]]
        check_engine(ngram.engine)
    assert [done[i] for i in range(len(wanted))] == alone
    assert ngram.engine.scheduler.blocks.usage == 0


def test_nothing_compiles_after_the_start(drafted):
    forms = [SamplingParams(max_tokens=9, structured_outputs=FORMS["regex"])]
    forms = forms if drafted.engine.runner.config.structured_outputs else []
    # The engine is the session's: JAX's caches may have been cleared since its start (tests/conftest.py).
    for runner in (drafted.engine.runner, drafted.engine.speculator.draft_model):
        if runner is not None:
            runner.warm_up()
    with nothing_compiles(drafted):
        for batch in (PROMPTS, PROMPTS[3:4], REPEATED):
            for params in (SamplingParams(**LOOPING, logprobs=1), *forms):
                outputs(drafted, batch, params)


FLAT, STEEP = StepCost(8, 18), StepCost(1, 1)


def policy(cost=FLAT, num_drafts=7, draft_cost=0.0):
    return Policy(cost, [2, 4, 8, 16, 32], num_drafts, draft_cost)


@pytest.mark.parametrize(
    ("options", "num_rows", "rates", "most", "total"),
    [
        ({}, 1, [0.9], 7, 7),  # rows that cost nothing are filled
        ({"num_drafts": 32}, 1, [0.5], 32, 7),
        ({}, 1, [0.9], 2, 2),
        ({}, 1, [0.05], 7, 0),  # there are none where they do not pay
        ({"cost": STEEP}, 1, [0.6], 7, 0),
        ({"draft_cost": 0.9}, 1, [0.6], 7, 0),
        ({}, 32, [0.9] * 4, 7, 0),
        ({"cost": StepCost(4, 6)}, 16, [0.3], 7, 0),
    ],
)
def test_drafts_fill_the_rows_that_cost_nothing_where_they_pay(options, num_rows, rates, most, total):
    assert sum(policy(**options).choose(num_rows, rates, [most] * len(rates))) == total


@pytest.mark.parametrize(
    ("given", "bounds"), [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2))]
)
def test_a_bound_that_is_left_out_is_the_other(given, bounds):
    config = SpeculativeConfig(4, method="ngram", **given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == bounds


NGRAM_OF_2 = {"method": "ngram", "num_speculative_tokens": 2}
WRONG = [
    ("{", "expected JSON such as"),
    ("[1]", "expected .*, got"),
    ({"method": "ngram"}, "num_speculative_tokens: expected .*, got None"),
    ({"num_speculative_tokens": 4}, "method: expected one of .*, got none"),
    ({"method": "eagle", "num_speculative_tokens": 4}, "method: expected one of ngram, .*, got 'eagle'"),
    *(
        (
            {"method": "ngram", "num_speculative_tokens": count},
            f"num_speculative_tokens: expected .* 1 to 32, got {count}",
        )
        for count in (0, 33, True)
    ),
    ({**NGRAM_OF_2, "prompt_lookup_min": 0}, "prompt_lookup_min: expected .*, got 0"),
    ({**NGRAM_OF_2, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min: 3 is more than"),
    ({**NGRAM_OF_2, "ngram_size": 3}, "ngram_size: no such field"),
    ({**NGRAM_OF_2, "model": "x"}, "model: the method .ngram. has none"),
]


@pytest.mark.parametrize(("value", "message"), WRONG)
def test_a_wrong_value_is_refused_by_name(value, message):
    with pytest.raises(InvalidParameterError, match=f"^speculative_config: {message}"):
        EngineConfig(speculative_config=value)
